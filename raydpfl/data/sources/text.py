"""Text, of which each client has its own."""

import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, SerializeAsAny, field_validator

from raydpfl.data.columns import KINDS, READERS, named_array, read_columns
from raydpfl.data.partitions import Natural, Partition
from raydpfl.data.sources.base import InMemoryData, Samples
from raydpfl.errors import ConfigError, one_line
from raydpfl.models.tasks import Target, Task
from raydpfl.models.tasks.sequence import Sequence
from raydpfl.storage.files import file_identity, find_file, read_text

LARGEST = 1 << 30  # bytes of a file of text


class Text(InMemoryData):
    """The next character of what each client has written, at every position: samples are windows of
    `length` characters, one after another, and targets the characters that follow them.

    In a play a line that is a name and a colon begins the speech of a client. Of each client the
    last windows (their share is rounded) are test rows, but not its only one. What fills up the
    last window of a client is not scored, nor are characters that the alphabet lacks.
    """

    file_fields: ClassVar[frozenset[str]] = frozenset({"path"})

    division: ClassVar[frozenset[str]] = InMemoryData.division | {
        "path",
        "text",
        "speaker",
        "apart",
        "client",
        "test_fraction",
    }
    kind: str = "text"
    location: ClassVar[str] = "your own file"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ()  # it needs a file
    path: str = Field(description="a play, or a table with the columns `text` and `client`")
    length: int = Field(default=80, ge=1, description="characters of a sample")
    speaker: str = Field(default="[A-Z][A-Za-z ]+", description="regular expression of a name")
    apart: bool = Field(default=False, description="a speech begins only after an empty line")
    text: str = Field(default="text", description="the column of texts")
    client: str = Field(default="client", description="the column of each text's client")
    test_fraction: float = Field(default=0.1, gt=0, lt=1, description="share of a client's windows")
    characters: str | None = Field(
        default=None, min_length=2, description="the alphabet; None: those that occur"
    )
    task: SerializeAsAny[Task] = Field(default=Sequence(), description="what is learnt")
    partition: SerializeAsAny[Partition] = Field(
        default=Natural(), description="which samples each client has"
    )

    @field_validator("speaker")
    @classmethod
    def _pattern(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"a regular expression ({error})") from None
        return value

    def knows_clients(self) -> bool:
        return True

    @property
    def exclusions(self) -> tuple[str, ...]:
        if self.characters is not None:
            return super().exclusions
        alphabet = "the characters that occur (unless data.characters names an alphabet)"
        return (*super().exclusions, alphabet)

    @property
    def sample_exclusions(self) -> tuple[str, ...]:
        window = f"a sample is a window of {self.length} characters and the one that follows each"
        return (f"{window}: the character between two windows is in both",)

    def sources(self, root: Path | None) -> list:
        return [file_identity("data.path", self.path, root)]

    def samples(self, seed: int, root: Path | None) -> Samples:
        texts = self.texts_by_client(root)
        codes = {name: _codes(text) for name, text in texts.items() if len(text) > 1}
        if not codes:
            expected = "text of two characters or more by some client"
            raise ConfigError("data.path", self.path, expected)
        letters = codes.values() if self.characters is None else [_codes(self.characters)]
        # the code points of the alphabet, ascending
        alphabet = np.unique(np.concatenate([np.unique(code) for code in letters]))
        parts: dict[str, list[np.ndarray]] = {"train": [], "test": []}
        owners = []
        for place, name in enumerate(sorted(codes)):
            windows = self._windows(_alphabet_positions(codes[name], alphabet), len(alphabet))
            test_count = min(int(self.test_fraction * len(windows) + 0.5), len(windows) - 1)
            parts["train"].append(windows[: len(windows) - test_count])
            parts["test"].append(windows[len(windows) - test_count :])
            owners.append(np.full(len(windows) - test_count, place))
        train, test = (np.concatenate(part) for part in parts.values())
        if not len(test):
            expected = (
                "a larger share (or a smaller data.length): it comes to no window of any client"
            )
            raise ConfigError("data.test_fraction", self.test_fraction, expected)
        names = tuple(map(chr, alphabet.tolist()))
        target = Target((self.length,), len(alphabet), names)
        client = np.concatenate(owners)
        x, y = self._pairs(train, len(alphabet))
        test_x, test_y = self._pairs(test, len(alphabet))
        return Samples(x, y, test_x, test_y, client, target, len(alphabet) + 1, sorted(codes))

    def texts_by_client(self, root: Path | None) -> dict[str, str]:
        """What each client has written, by its name. Raises `ConfigError`."""
        path = find_file("data.path", self.path, root)
        if path.suffix not in (*READERS, ".npz"):
            try:
                text = read_text(path, LARGEST)
            except (OSError, UnicodeDecodeError) as error:
                expected = f"a text in UTF-8, or {KINDS} ({one_line(error)})"
                raise ConfigError("data.path", self.path, expected) from None
            return self._speeches(text)
        columns = read_columns("data.path", self.path, root)
        texts = named_array(columns, self.text, "data.text").astype(str)
        clients = named_array(columns, self.client, "data.client").astype(str)
        lines_by_client: dict[str, list[str]] = {}
        for name, text in zip(clients.tolist(), texts.tolist(), strict=True):
            lines_by_client.setdefault(name, []).append(text)
        return {name: "\n".join(lines) for name, lines in lines_by_client.items()}

    def _speeches(self, text: str) -> dict[str, str]:
        """What each speaker of a play says."""
        pattern = re.compile(f"({self.speaker}):")
        speeches: dict[str, list[str]] = {}
        speech_lines = None  # the lines of who speaks
        empty = True  # the line before
        for line in text.splitlines():
            heading = pattern.fullmatch(line) if empty or not self.apart else None
            if heading:
                speech_lines = speeches.setdefault(heading[1], [])
            elif speech_lines is not None:
                speech_lines.append(line)
            empty = not line
        if not speeches:
            expected = "a pattern of names: no line is such a name and a colon"
            raise ConfigError("data.speaker", self.speaker, expected)
        return {name: "\n".join(lines) for name, lines in speeches.items()}

    def _windows(self, codes: np.ndarray, fill: int) -> np.ndarray:
        """The windows of a text and the character after each, [windows, length + 1]."""
        count = -(-(len(codes) - 1) // self.length)
        padded_codes = np.full(count * self.length + 1, fill, np.int64)
        padded_codes[: len(codes)] = codes
        starts = np.arange(count)[:, None] * self.length
        return padded_codes[starts + np.arange(self.length + 1)]

    def _pairs(self, windows: np.ndarray, fill: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets."""
        y = windows[:, 1:]
        return windows[:, :-1].copy(), np.where(y == fill, self.task.ignore_index(), y)


def _codes(text: str) -> np.ndarray:
    """The code points of a text."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _alphabet_positions(codes: np.ndarray, alphabet: np.ndarray) -> np.ndarray:
    """The places of code points in the alphabet, int64; its length for all others."""
    places = np.minimum(np.searchsorted(alphabet, codes), len(alphabet) - 1)
    return np.where(alphabet[places] == codes, places, len(alphabet))
