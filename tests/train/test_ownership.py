"""Every parameter has exactly one owner, and the owner is the one of the table."""

from collections import Counter

import pytest

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.config import Config, from_json
from headrace.train.optim.ownership import Owner, Splits, assign, family_rules
from headrace.train.optim.rules import FAMILIES, V4, V41, Rule
from tests.factories import tiny_config
from tests.release import DOCUMENT
from tests.train.master_names import master_shapes

SPLITS = Splits(heads=4, index_heads=3, groups=2)
V4_LAYER = {
    "attn_norm.weight": (24,),
    "ffn_norm.weight": (24,),
    "hc_attn_fn": (24, 96),
    "hc_ffn_fn": (24, 96),
    "hc_attn_base": (24,),
    "hc_ffn_base": (24,),
    "hc_attn_scale": (3,),
    "hc_ffn_scale": (3,),
    "attn.attn_sink": (4,),
    "attn.q_norm.weight": (12,),
    "attn.kv_norm.weight": (16,),
    "attn.wq_a.weight": (12, 24),
    "attn.wq_b.weight": (64, 12),
    "attn.wkv.weight": (16, 24),
    "attn.wo_a.weight": (20, 32),
    "attn.wo_b.weight": (24, 20),
    "attn.compressor.ape": (4, 32),
    "attn.compressor.wkv.weight": (32, 24),
    "attn.compressor.wgate.weight": (32, 24),
    "attn.compressor.norm.weight": (16,),
    "attn.indexer.wq_b.weight": (24, 12),
    "attn.indexer.weights_proj.weight": (3, 24),
    "attn.indexer.compressor.ape": (4, 16),
    "attn.indexer.compressor.wkv.weight": (16, 24),
    "attn.indexer.compressor.wgate.weight": (16, 24),
    "attn.indexer.compressor.norm.weight": (8,),
    "ffn.gate.weight": (6, 24),
    "ffn.experts.w1": (6, 14, 24),
    "ffn.experts.w2": (6, 24, 14),
    "ffn.experts.w3": (6, 14, 24),
    "ffn.shared_experts.w1.weight": (14, 24),
    "ffn.shared_experts.w2.weight": (24, 14),
    "ffn.shared_experts.w3.weight": (14, 24),
}
V4_OTHER = {
    "embed.weight": (50, 24),
    "head.weight": (50, 24),
    "norm.weight": (24,),
    "hc_head_fn": (4, 96),
    "hc_head_base": (4,),
    "hc_head_scale": (1,),
    "mtp.0.e_proj.weight": (24, 24),
    "mtp.0.h_proj.weight": (24, 24),
    "mtp.0.enorm.weight": (24,),
    "mtp.0.hnorm.weight": (24,),
    "mtp.0.norm.weight": (24,),
    "mtp.0.hc_head_fn": (4, 96),
    "mtp.0.hc_head_base": (4,),
    "mtp.0.hc_head_scale": (1,),
}


def owners(config: Config, **options: object) -> dict[str, Owner]:
    return assign(master_shapes(config), V41, Splits.of(config), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [{}, {"vision": False}, {"draft": False}, {"engram": False}])
def test_every_parameter_of_a_model_has_one_owner(parts: dict[str, bool]) -> None:
    config = tiny_config(**parts)
    assert owners(config).keys() == master_shapes(config).keys()


def test_every_parameter_of_the_released_model_has_one_owner_and_every_rule_is_used() -> None:
    shapes = master_shapes(from_json(DOCUMENT))
    found = assign(shapes, V41, Splits(heads=64, index_heads=32, groups=8))
    assert found.keys() == shapes.keys()
    unused = {rule.group for rule in V41 if rule.update != "balance"} - {owner.group for owner in found.values()}
    assert unused == set()


def test_every_parameter_of_a_v4_model_has_one_owner_and_every_rule_is_used() -> None:
    layers = {f"{block}.{name}": shape for block in ("layers.3", "mtp.0") for name, shape in V4_LAYER.items()}
    shapes = layers | V4_OTHER
    found = assign(shapes, V4, SPLITS)
    assert found.keys() == shapes.keys()
    own = {rule.group for rule in V4 if rule.update != "balance"} - {"index_keys"}  # a name of V4.1's graph
    assert own == {owner.group for owner in found.values()}


def test_rules_of_v4_own_every_parameter_of_the_graph_that_stands_in_for_v4s() -> None:
    shapes = master_shapes(tiny_config(vision=False, draft=False, engram=False))
    found = assign(shapes, V4, SPLITS)
    assert found.keys() == shapes.keys()
    assert {owner.update for owner in found.values()} == {"muon", "adamw"}


@pytest.mark.parametrize(
    ("name", "update", "matrices", "rate", "decay"),
    [
        ("embed.weight", "sinkhorn", 1, 1.0, 0.0),
        ("head.weight", "sinkhorn", 1, 1.0, 0.0),
        ("layers.1.engram.embed.weight", "sinkhorn", 1, 5.0, 0.0),
        ("layers.1.engram.wkv.weight", "muon", 1, 5.0, 0.1),
        ("layers.1.engram.q_weight", "adamw", 1, 5.0, 0.1),
        ("layers.0.attn.wq_b.weight", "muon", 64, 1.0, 0.1),
        ("layers.2.attn.indexer.wq_b.weight", "muon", 32, 1.0, 0.1),
        ("layers.2.attn.indexer.wk.weight", "muon", 1, 1.0, 0.1),
        ("layers.2.attn.compressor.wgate.weight", "muon", 1, 1.0, 0.1),
        ("layers.0.attn.wkv.weight", "muon", 1, 1.0, 0.1),
        ("layers.0.attn.wo_a.weight", "muon", 8, 1.0, 0.1),
        ("layers.0.attn.wo_b.weight", "muon", 1, 1.0, 0.1),
        ("layers.0.hc_attn_fn", "muon", 1, 1.0, 0.1),
        ("layers.0.hc_attn_base", "adamw", 1, 1.0, 0.0),
        ("layers.0.hc_ffn_scale", "adamw", 1, 1.0, 0.0),
        ("layers.0.attn.attn_sink", "adamw", 1, 1.0, 0.0),
        ("layers.0.attn.kv_norm.weight", "adamw", 1, 1.0, 0.1),
        ("norm.weight", "adamw", 1, 1.0, 0.1),
        ("layers.0.ffn.gate.weight", "muon", 1, 1.0, 0.1),
        ("layers.0.ffn.experts.w1", "muon", 384, 1.0, 0.1),
        ("mtp.0.ffn.experts.w2", "muon", 128, 1.0, 0.1),
        ("layers.0.ffn.shared_experts.w3.weight", "muon", 1, 1.0, 0.1),
        ("vision.blocks.0.attn.wqkv.weight", "muon", 3, 1.0, 0.1),
    ],
)
def test_v41_owner_is_the_one_of_the_table(name: str, update: str, matrices: int, rate: float, decay: float) -> None:
    owner = owners(from_json(DOCUMENT))[name]
    assert (owner.update, owner.matrices, owner.rate, owner.decay) == (update, matrices, rate, decay)


def test_v4_decays_embedding_and_head_by_adamw_and_takes_queries_whole() -> None:
    found = assign({f"layers.0.{name}": shape for name, shape in V4_LAYER.items()} | V4_OTHER, V4, SPLITS)
    assert all((found[name].update, found[name].decay) == ("adamw", 0.1) for name in ("embed.weight", "head.weight"))
    assert found["layers.0.attn.wq_b.weight"].matrices == found["layers.0.attn.indexer.wq_b.weight"].matrices == 1
    assert found["layers.0.attn.wo_a.weight"].matrices == 2


def test_no_name_of_a_table_is_claimed_twice() -> None:
    for rules in FAMILIES.values():
        counts = Counter(name for rule in rules for name in rule.names)
        assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(
    ("name", "shape", "part"),
    [
        ("layers.0.attn.wz.weight", (4, 4), "layers.0.attn.wz.weight has no update rule"),
        ("layers.x.attn.wkv.weight", (4, 4), "layers.x.attn.wkv.weight has no update rule"),
        ("layers.0.attn.wkv.weight.extra", (4, 4), "has no update rule"),
        ("layers.0.ffn.gate.bias", (8,), "layers.0.ffn.gate.bias is moved by the balance"),
        ("layers.0.attn.wq_b.weight", (6, 4), "6 rows, which do not divide into 4 matrices"),
        ("layers.0.attn.wkv.weight", (6,), "Muon accepts a matrix"),
        ("layers.0.ffn.experts.w1", (6, 4), "one matrix per expert"),
        ("embed.weight", (6,), "the Sinkhorn rule accepts a table"),
    ],
)
def test_a_parameter_without_a_usable_owner_is_refused_by_name(name: str, shape: tuple[int, ...], part: str) -> None:
    with pytest.raises(UserError, match=part) as refusal:
        assign({name: shape}, V41, SPLITS)
    assert refusal.value.param == name


def test_a_parameter_with_two_owners_is_refused() -> None:
    rules = (*V41, Rule(group="mine", names=("norm.*",), update="adamw"))
    with pytest.raises(UserError, match=r"norm.weight has 2 update rules \(mine, norms\)"):
        assign({"norm.weight": (4,)}, rules, SPLITS)


def test_frozen_parameters_have_no_owner_but_must_be_known() -> None:
    config = tiny_config()
    found = owners(config, frozen=("vision.*", "mtp.*"))
    assert found
    assert not [name for name in found if name.startswith(("vision.", "mtp."))]
    assert owners(config).keys() - found.keys() == {
        name for name in master_shapes(config) if name.startswith(("vision.", "mtp."))
    }
    with pytest.raises(UserError, match=r"'visoin\.\*' matches no parameter"):
        owners(config, frozen=("visoin.*",))
    with pytest.raises(UserError, match="has no update rule"):
        assign({"strange": (4,)}, V41, SPLITS, frozen=("strange",))


def test_groups_of_a_family_can_be_changed_by_name() -> None:
    rules = family_rules("v4.1", {"embedding": {"rate": 4.0}, "engram_table": {"update": "adamw", "rate": 5.0}})
    found = assign({"embed.weight": (6, 4), "layers.1.engram.embed.weight": (9, 4)}, rules, SPLITS)
    assert found["embed.weight"].rate == 4.0
    assert found["layers.1.engram.embed.weight"].update == "adamw"
    assert family_rules("v4.1") == V41


@pytest.mark.parametrize(
    ("family", "changes", "part"),
    [
        ("v5", {}, "'v5' is unknown; v4, v4.1 are accepted"),
        ("v4", {"engram_table": {}}, "no parameter group 'engram_table'"),
        ("v4.1", {"norms": {"names": ()}}, "no field 'names' to change"),
        ("v4.1", {"norms": {"update": "sgd"}}, "update 'sgd'"),
        ("v4.1", {"norms": {"split": "columns"}}, "split 'columns'"),
        ("v4.1", {"norms": {"rate": 0.0}}, "rate 0.0"),
        ("v4.1", {"norms": {"decay": float("nan")}}, "decay nan"),
    ],
)
def test_changes_that_make_no_sense_are_refused(family: str, changes: dict[str, dict[str, object]], part: str) -> None:
    with pytest.raises(UserError, match=part):
        family_rules(family, changes)
