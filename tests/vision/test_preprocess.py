import dataclasses
import io
import pathlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headrace.core.errors import CheckpointError, UserError
from headrace.vision.patches import preprocess
from headrace.vision.preprocess import ImageRules, fit_image, plan_image, read_image

RULES = ImageRules(patch_size=14, downsample=3, max_image_tokens=1024, min_pixels=295936)
MINI = ImageRules(patch_size=14, downsample=3, max_image_tokens=64, min_pixels=7056)


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8)
    return Image.fromarray(values).convert(mode)


@pytest.mark.parametrize(
    ("width", "height", "best_h", "best_w", "cells", "tokens"),
    [
        (640, 480, 490, 644, (12, 16), 206),
        (1024, 768, 770, 1036, (19, 25), 496),
        (2048, 1536, 1134, 1512, (27, 36), 1001),
        (4096, 4096, 1302, 1302, (31, 31), 994),
        (147, 147, 546, 546, (13, 13), 184),
        (544, 544, 546, 546, (13, 13), 184),
        (64, 512, 1540, 196, (37, 5), 224),
        (4200, 100, 112, 4200, (3, 100), 305),
        (100, 4200, 4200, 112, (100, 3), 402),
        (5000, 30, 42, 7028, (1, 168), 171),
    ],
)
def test_published_sizes(width: int, height: int, best_h: int, best_w: int, cells: tuple, tokens: int) -> None:
    plan = plan_image(width, height, RULES)
    assert (plan.height, plan.width, plan.cell_grid, plan.num_tokens) == (best_h, best_w, cells, tokens)
    assert plan.patch_grid == (best_h // 14, best_w // 14)


def test_golden_image_span_comes_from_a_small_picture() -> None:
    plan = plan_image(120, 80, MINI)
    assert (plan.patch_grid, plan.cell_grid, plan.num_tokens) == ((6, 9), (2, 3), 10)


def test_enlarged_sides_are_cut_to_whole_pixels_not_rounded() -> None:
    # 101 x 100 grows to 546.7 x 541.3 and 110 x 100 to 570.6 x 518.7; rounding would start another patch
    assert plan_image(101, 100, RULES).patch_grid == (39, 39)
    assert plan_image(110, 100, RULES).patch_grid == (37, 41)


@given(st.integers(1, 30_000), st.integers(1, 30_000), st.sampled_from([RULES, MINI]))
def test_no_size_costs_more_than_allowed_or_leaves_the_patch_grid(width: int, height: int, rules: ImageRules) -> None:
    plan = plan_image(width, height, rules)
    rows, columns = plan.cell_grid
    assert plan.num_tokens == rows * (columns + 1) + 2 <= rules.max_image_tokens
    assert (plan.height, plan.width) == (plan.patch_grid[0] * 14, plan.patch_grid[1] * 14)
    assert min(plan.patch_grid) >= 1


@pytest.mark.parametrize(("width", "height", "cells"), [(300_000, 2, (1, 1021)), (2, 300_000, (511, 1))])
def test_extremely_long_image_takes_one_row_or_column_of_cells(width: int, height: int, cells: tuple) -> None:
    plan = plan_image(width, height, RULES)
    assert plan.cell_grid == cells
    assert plan.num_tokens in {1023, 1024}


def test_width_limit_clips_the_width_before_sizing_and_squeezes_the_picture() -> None:
    limited = dataclasses.replace(RULES, max_wh_ratio=2.0)
    assert plan_image(4200, 1000, limited) == plan_image(2000, 1000, RULES)
    assert plan_image(1999, 1000, limited) == plan_image(1999, 1000, RULES)
    wide = picture(4200, 1000)
    fitted = fit_image(wide, plan_image(4200, 1000, limited), limited)
    expected = wide.resize(fitted.size, Image.Resampling.BICUBIC)
    assert fitted.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("size", "offset", "new_size"),
    [
        ((640, 480), (0, 4), (644, 483)),  # 644 x 490: (490 - 483) / 2 = 3.5, rounded to the even 4
        ((147, 147), (0, 0), (546, 546)),
        ((64, 512), (2, 0), (192, 1540)),
    ],
)
def test_picture_is_scaled_and_centred_on_grey(size: tuple, offset: tuple, new_size: tuple) -> None:
    image = picture(*size)
    plan = plan_image(*size, RULES)
    expected = Image.new("RGB", (plan.width, plan.height), (127, 127, 127))
    expected.paste(image.resize(new_size, Image.Resampling.BICUBIC), offset)
    assert fit_image(image, plan, RULES).tobytes() == expected.tobytes()


def test_patches_are_scaled_pixels_in_reading_order() -> None:
    image = picture(126, 84)  # 6 x 9 patches: used as it is
    patches, plan = preprocess(image, MINI)
    assert plan.patch_grid == (6, 9)
    assert patches.shape == (54, 3, 14, 14)
    assert patches.dtype == torch.bfloat16
    pixels = np.asarray(image)
    for row, column, channel, y, x in [(0, 0, 0, 0, 0), (2, 7, 1, 3, 11), (5, 8, 2, 13, 13), (1, 0, 2, 0, 5)]:
        value = np.float32(pixels[row * 14 + y, column * 14 + x, channel])
        scaled = (value / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
        assert patches[row * 9 + column, channel, y, x] == torch.tensor(scaled).to(torch.bfloat16)


def test_black_and_white_become_minus_one_and_one() -> None:
    for value, scaled in ((0, -1.0), (255, 1.0)):
        patches, _ = preprocess(Image.new("L", (126, 84), value), MINI)
        assert (patches == scaled).all()


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_every_mode_is_read_as_rgb(mode: str) -> None:
    image = picture(126, 84, mode)
    assert torch.equal(preprocess(image, MINI)[0], preprocess(image.convert("RGB"), MINI)[0])


def test_image_is_read_from_path_bytes_and_open_file(tmp_path: pathlib.Path) -> None:
    image = picture(30, 20)
    image.save(tmp_path / "picture.png")
    data = (tmp_path / "picture.png").read_bytes()
    for source in (tmp_path / "picture.png", str(tmp_path / "picture.png"), data, io.BytesIO(data)):
        assert read_image(source).tobytes() == image.tobytes()


def test_unreadable_image_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    picture(30, 20).save(tmp_path / "whole.png")
    data = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.png").write_text("no picture")
    for name, message in (("gone", "does not exist"), ("cut", "cannot be read"), ("text", "cannot be read")):
        with pytest.raises(UserError, match=rf"{name}\.png {message}"):
            read_image(tmp_path / f"{name}.png")
    with pytest.raises(UserError, match="the image cannot be read"):
        read_image(b"")


def test_image_with_too_many_pixels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    picture(30, 20).save(buffer, "png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)
    with pytest.raises(UserError, match="the image is too large"):
        read_image(buffer.getvalue())


def test_image_whose_short_side_would_vanish_is_refused() -> None:
    image = Image.new("RGB", (100_000, 1))
    with pytest.raises(UserError, match="100000 x 1 pixels"):
        preprocess(image, RULES)
    with pytest.raises(UserError, match="0 x 5"):
        plan_image(0, 5, RULES)


@pytest.mark.parametrize(
    ("field", "value"), [("patch_size", 0), ("downsample", 0), ("max_image_tokens", 3), ("max_wh_ratio", 0.0)]
)
def test_impossible_rule_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(CheckpointError, match=f"{field} is {value}"):
        dataclasses.replace(RULES, **{field: value})
