"""Images in folders, one for each class."""

import hashlib
import io
from pathlib import Path
from typing import Any, ClassVar, Literal

import pyarrow as pa
from pydantic import Field

from raydpfl.data.columns import Columns
from raydpfl.data.inputs import FORMATS, HIGH_DEPTH_MODES
from raydpfl.data.sources.table import Tabular
from raydpfl.errors import ConfigError
from raydpfl.storage.files import digest, find_file

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


class ImageFolder(Tabular):
    """Images in a folder for each class, whose name is the label, `train/cat/1.png`; or with
    `client: client`, for partition natural, in folders of clients, `train/ann/cat/1.png`.
    Images have one size, and all are grey or none is, unless `size` and `channels` make them so.
    """

    file_fields: ClassVar[frozenset[str]] = Tabular.file_fields | {"train", "test"}
    added_fields: ClassVar[frozenset[str]] = Tabular.added_fields | {"channels"}

    kind: str = "image_folder"
    location: ClassVar[str] = "your own folder"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ()  # it needs a folder
    train: str = Field(description="a folder, absolute or relative to data root or working folder")
    test: str | None = Field(default=None, description="as `train`")
    size: int | None = Field(
        default=None, ge=1, le=1 << 12, description="pixels that images are made high and wide"
    )
    channels: Literal[1, 3] | None = Field(
        default=None, description="grey (1) or RGB (3), that images are made"
    )

    def source(self, part: str, name: str, root: Path | None) -> list[str]:
        folder, paths = self._images(part, name, root)
        facts = hashlib.sha256()
        for path in paths:
            facts.update(f"{path.relative_to(folder)} {digest(path)}\n".encode())
        return [part, facts.hexdigest()]

    def read(self, part: str, name: str, root: Path | None) -> Columns:
        folder, paths = self._images(part, name, root)
        places = [path.relative_to(folder).parts for path in paths]
        columns = {
            "image": [self._read_image(path) for path in paths],
            "label": [place[-2] for place in places],
        }
        if self.client is not None:
            columns["client"] = [place[0] for place in places]
        arrays = {name: pa.chunked_array([values]) for name, values in columns.items()}
        return Columns(folder.name, arrays, part, ["/".join(place) for place in places])

    def _images(self, part: str, name: str, root: Path | None) -> tuple[Path, list[Path]]:
        """A folder, and the images of its classes in the order of their names."""
        folder = find_file(f"data.{part}", name, root, "folder")
        levels, layout = ("*/*/*", "CLIENT/CLASS") if self.client else ("*/*", "CLASS")
        paths = sorted(
            path
            for path in folder.glob(levels)
            if path.suffix.lower() in SUFFIXES and path.is_file()
        )
        if not paths:
            expected = f"a folder with images {layout}/NAME, a folder for each class"
            raise ConfigError(f"data.{part}", name, expected)
        return folder, paths

    def _read_image(self, path: Path) -> bytes:
        """The bytes of an image, scaled and converted if asked. Raises `ConfigError`."""
        image_bytes = path.read_bytes()
        if self.size is None and self.channels is None:
            return image_bytes
        from PIL import Image

        try:
            with Image.open(io.BytesIO(image_bytes), formats=FORMATS) as image:
                if image.mode.startswith(HIGH_DEPTH_MODES):
                    return image_bytes  # it is refused by name where it is decoded
                grey = self.channels == 1 or (self.channels is None and image.mode == "L")
                output_image = image.convert("L" if grey else "RGB")
                if self.size is not None:
                    target_size = (self.size, self.size)
                    output_image = output_image.resize(target_size, Image.Resampling.BILINEAR)
        except Exception as error:  # whatever a broken image makes its decoder raise
            expected = f"encoded images; {path.name} is no image ({type(error).__name__})"
            raise ConfigError("data.train", str(path.parent), expected) from None
        buffer = io.BytesIO()
        output_image.save(buffer, "PPM")
        return buffer.getvalue()
