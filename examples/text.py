"""Text in and out: the tokenizer's interface, a byte tokenizer, and printing several streams as they come."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back; special tokens decode to their names."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def byte_tokenizer(first_byte: int, specials: Sequence[str]) -> Tokenizer:
    """UTF-8 bytes as tokens `first_byte`..., the ids below are `specials`; ids past the bytes decode to nothing."""

    def piece(token: int) -> bytes:
        byte = token - first_byte
        return specials[token].encode() if byte < 0 else bytes([byte]) if byte < 256 else b""

    def decode(ids: Sequence[int]) -> str:
        return b"".join(map(piece, ids)).decode(errors="replace")

    return Tokenizer(encode=lambda text: [first_byte + byte for byte in text.encode()], decode=decode)


@dataclass
class Stream:
    """Prints one stream of text, or several, each in lines that begin with its number.

    A text that ends within a character is held back until the rest of the character has come.
    """

    tokenizer: Tokenizer
    labels: Sequence[str]
    width: int = 88
    out: TextIO = field(default_factory=lambda: sys.stdout)
    _ids: dict[int, list[int]] = field(default_factory=dict)
    _shown: dict[int, str] = field(default_factory=dict)
    _line: dict[int, str] = field(default_factory=dict)

    def __call__(self, index: int, token: int, last: bool) -> None:
        """Takes the next token of stream `index`; `last` flushes what was held back."""
        ids = self._ids.setdefault(index, [])
        ids.append(token)
        text, shown = self.tokenizer.decode(ids), self._shown.get(index, "")
        if text.endswith("\ufffd") and not last:
            return
        self._shown[index] = text
        self._line[index] = self._line.get(index, "") + text[len(shown) :]
        self._print(index, last)

    def _print(self, index: int, last: bool) -> None:
        line = self._line[index]
        if len(self.labels) == 1:
            print(line, end="\n" if last else "", file=self.out, flush=True)
            self._line[index] = ""
            return
        while "\n" in line or len(line) > self.width:
            end = line.find("\n", 0, self.width + 1)
            end = end if end >= 0 else (line.rfind(" ", 1, self.width) if " " in line[1 : self.width] else self.width)
            self._emit(index, line[:end])
            line = line[end:].removeprefix("\n")
        self._line[index] = line
        if last and line:
            self._emit(index, line)

    def _emit(self, index: int, line: str) -> None:
        print(f"{self.labels[index]} {line}", file=self.out, flush=True)
