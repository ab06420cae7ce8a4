"""Token ids of texts, by a vocabulary that is declared: none is learnt from the data, which would
be a query of them that no accountant counts.

>>> encoder = Encoder("words", ("good", "film"), length=4)
>>> encoder.ids(["A good film!", "good"])
array([[1, 2, 3, 1],
       [2, 0, 0, 0]])
>>> encoder.size
4

0 stands behind the end of a text, 1 for a token that the vocabulary lacks, 2, 3, ... for its tokens
in their order. A tokenizer that gives ids has its own from 1 on, below `vocabulary`.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from raydpfl.config.registry import load
from raydpfl.config.source_code import code_digest
from raydpfl.errors import USER_EXCEPTIONS, ConfigError, located_message
from raydpfl.storage.files import find_file, read_text

PADDING = 0  # the id behind the end of a text
UNKNOWN = 1  # of a token that the vocabulary lacks
FIRST_TOKEN = 2  # of the tokens of a vocabulary
LARGEST = 1 << 20  # entries of a vocabulary at most
WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")

Vocabulary = tuple[str, ...] | int


def words(text: str) -> list[str]:
    """The words of a text in lower case, and each sign between them.

    >>> words("It's GOOD, no?")
    ["it's", 'good', ',', 'no', '?']
    """
    return WORD.findall(text.lower())


TOKENIZERS: dict[str, Callable[[str], Sequence[Any]]] = {"words": words, "characters": list}


@dataclass(frozen=True)
class Encoder:
    """What makes token ids of texts, the first `length` of each: by a name of `TOKENIZERS` or the
    import path of a function that gives tokens (str) or ids, and by a `vocabulary` of tokens in the
    order of their ids, or the number of ids.
    """

    tokenizer: str
    vocabulary: Vocabulary
    length: int

    @property
    def size(self) -> int:
        """Ids are below it."""
        vocabulary = self.vocabulary
        return vocabulary if isinstance(vocabulary, int) else FIRST_TOKEN + len(vocabulary)

    @cached_property
    def _tokenize(self) -> Callable[[str], Sequence[Any]]:
        tokenizer = TOKENIZERS.get(self.tokenizer)
        return tokenizer or load(self.tokenizer, "data.tokenizer")

    @cached_property
    def _numbers(self) -> dict[str, int]:
        assert not isinstance(self.vocabulary, int)
        return {token: FIRST_TOKEN + place for place, token in enumerate(self.vocabulary)}

    def known(self, ids: np.ndarray) -> np.ndarray:
        """Which ids are tokens of the vocabulary, bool of the same shape."""
        return ids >= (1 if self._gives_ids else FIRST_TOKEN)

    def code(self) -> str | None:
        """The digest of a user's tokenizer: of the module that its path names, and of the one that
        its function or class is of; None: the project's.
        """
        if self.tokenizer in TOKENIZERS:
            return None
        separator = ":" if ":" in self.tokenizer else "."
        path_module = self.tokenizer.rpartition(separator)[0]
        modules = {path_module, getattr(self._tokenize, "__module__", None) or path_module}
        return " ".join(
            code_digest(sys.modules.get(name), self._tokenize) for name in sorted(modules)
        )

    def ids(self, texts: Sequence[str]) -> np.ndarray:
        """Int64 [texts, length]. Raises `ConfigError`."""
        padded_ids = np.full((len(texts), self.length), PADDING, np.int64)
        for row, ids in enumerate(self.token_ids(texts)):
            padded_ids[row, : len(ids)] = ids[: self.length]
        return padded_ids

    def token_ids(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """The ids of all tokens of each text. Raises `ConfigError`."""
        tokenize = self._tokenize
        for row, text in enumerate(texts):
            try:
                tokens = list(tokenize(text))
            except USER_EXCEPTIONS as error:  # a user's tokenizer may raise anything
                expected = f"a function of a text that gives its tokens; of row {row} it raises "
                expected += located_message(error)
                raise ConfigError("data.tokenizer", self.tokenizer, expected) from None
            yield self._encode_tokens(tokens, row)

    @property
    def _gives_ids(self) -> bool:
        return isinstance(self.vocabulary, int)

    def _encode_tokens(self, tokens: list[Any], row: int) -> list[int]:
        """The ids of the tokens of a text. Raises `ConfigError`."""
        if self._gives_ids:
            kinds = (int, np.integer)
            if all(isinstance(token, kinds) and 0 < token < self.size for token in tokens):
                return [int(token) for token in tokens]
            expected = f"one that gives ids from 1 to {self.size - 1}, as data.vocabulary says"
        else:
            if all(isinstance(token, str) for token in tokens):
                return [self._numbers.get(token, UNKNOWN) for token in tokens]
            expected = "one that gives text with a data.vocabulary of tokens (of ids: their number)"
        expected += f"; it gives another of row {row}"
        raise ConfigError("data.tokenizer", self.tokenizer, expected)

    def counted(self, texts: Sequence[str]) -> dict[str, int]:
        """Counts of texts and tokens, by what becomes of them; for `raydpfl data describe`."""
        rows = [np.array(tokens, np.int64) for tokens in self.token_ids(texts)]
        all_ids = np.concatenate([*rows, np.zeros(0, np.int64)])
        unknown = 0 if self._gives_ids else int((all_ids == UNKNOWN).sum())
        return {
            "texts": len(rows),
            "empty texts": sum(not len(row) for row in rows),
            "tokens": len(all_ids),
            "unknown tokens": unknown,
            "tokens cut off": sum(max(0, len(row) - self.length) for row in rows),
            "tokens of the vocabulary": self.size - (1 if self._gives_ids else FIRST_TOKEN),
            "of these, in some text": len(np.unique(all_ids)) - (unknown > 0),
        }


def read_vocabulary(name: str, root: Path | None) -> tuple[str, ...]:
    """The tokens in the file `name`, one a line. Raises `ConfigError`."""
    path = find_file("data.vocabulary", name, root)
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        expected = f"a text in UTF-8, a token a line ({located_message(error)})"
        raise ConfigError("data.vocabulary", name, expected) from None
    tokens = tuple(text.removesuffix("\n").split("\n")) if text else ()
    check(tokens, name)
    return tokens


def check(vocabulary: Sequence[str], value: object) -> None:
    """Raises `ConfigError` for an empty one, or a token twice; `value`: as the config has it."""
    counts = Counter(vocabulary)
    top_token = max(counts, key=counts.__getitem__, default="")
    if not top_token or "" in counts or counts[top_token] > 1 or len(counts) > LARGEST:
        reason = f"; it has {top_token!r} twice" if counts[top_token] > 1 else ""
        expected = f"1 to {LARGEST:,} tokens, each once and none empty, a token a line of a file"
        raise ConfigError("data.vocabulary", value, f"{expected}{reason}")
