"""Pictures as items: the content of a file in base64, decoded on the node in its sandbox."""

import base64
import binascii
from io import BytesIO

from PIL import Image, ImageOps

from gpu_node.shell.worker.farm.chunk_items import TextItem
from hypergpu.workloads.finetuning.base_model import first_sentence


def is_picture(item: TextItem) -> bool:
    """Whether an item has the form of a picture."""
    return isinstance(item.value, dict) and isinstance(item.value.get("image"), str)


def picture_content(item: TextItem) -> tuple[bytes, str]:
    """The content of a picture's file, or why there is none."""
    try:
        return base64.b64decode(item.value["image"], validate=True), ""
    except binascii.Error as error:
        return b"", f"the item is no picture: {error}"


def decoded_picture(content: bytes) -> tuple[Image.Image | None, str]:
    """A picture upright and in colours, or why there is none."""
    try:
        with Image.open(BytesIO(content)) as image:
            return ImageOps.exif_transpose(image).convert("RGB"), ""
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return None, f"the picture cannot be read: {first_sentence(error)}"
