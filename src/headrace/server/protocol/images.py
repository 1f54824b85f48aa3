"""Images of a conversation as the bytes of their files, in the order of their places in the prompt."""

import base64
import binascii
import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

import deepseek_recipe as recipe

from headrace.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.server.settings import ServerSettings


def image_files(
    sources: "Sequence[recipe.ImageSource]", settings: "ServerSettings", *, has_vision: bool
) -> list[bytes]:
    """Return the encoded bytes of every image.

    Raises:
        UserError: the model sees nothing, there are too many, one is too large, not readable, or to be fetched where
            that is not allowed.
    """
    if not sources:
        return []
    if not has_vision:
        raise UserError("this model takes no images; accepted are messages of text", param=_param(sources[0]))
    if len(sources) > settings.max_images:
        raise UserError(
            f"{len(sources)} images were given; accepted are {settings.max_images} at most", param=_param(sources[0])
        )
    files = []
    for source in sources:
        data = _bytes(source, settings)
        if len(data) > settings.max_image_bytes:
            raise UserError(
                f"an image has {len(data):,} bytes; accepted are {settings.max_image_bytes:,} at most",
                param=_param(source),
            )
        files.append(data)
    return files


def may_connect(_host: str, address: str) -> bool:
    """Return whether an image may be fetched from an address: public ones only."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None) or getattr(found, "sixtofour", None)
    return found.is_global and not found.is_multicast and (mapped is None or mapped.is_global)


def _bytes(source: recipe.ImageSource, settings: "ServerSettings") -> bytes:
    if source.data is not None:
        return bytes(source.data)
    if source.data_url is not None:
        return _of_data_url(source.data_url, _param(source))
    if not settings.allow_image_urls:
        raise UserError(
            "images are not fetched from addresses by this server; accepted are data URLs", param=_param(source)
        )
    fetcher = recipe.ReqwestImageFetcher.with_max_bytes(settings.max_image_bytes).with_destination_filter(may_connect)
    try:
        return fetcher.fetch(source.url or "")
    except recipe.ImageError as error:
        raise UserError(f"an image could not be fetched ({error.kind})", param=_param(source)) from error


def _of_data_url(url: str, param: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.startswith("data:"):
        raise UserError("an image's data URL has no comma behind its head; accepted is data:TYPE;base64,DATA", param)
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError):
        raise UserError("an image's data is not base64", param=param) from None


def _param(source: recipe.ImageSource) -> str:
    return source.path or "image"
