"""Names of countries, regions, languages and currencies in many languages, to be translated into English.

They come with pycountry, which ships Debian's iso-codes and what its translators made of them. A language has from 50
names (Swahili) to 14,000 (Ukrainian): a tail of languages with few resources, as real ones have. A tenth of the names
is held out, by a checksum of the name as it is written, so in all languages that write it so. Its English name may be
known from others: that is what languages can learn from one another.
"""

from __future__ import annotations

import gettext
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import cluster
import numpy as np
import pycountry
import sentencepiece

LEAST_NAMES = 50
HELD_OUT = 10  # one of so many
SOURCE_TOKENS, TARGET_TOKENS = 16, 10
PADDING, END = 0, 2  # of sentencepiece's numbers; 1 is unknown, which bytes as a fallback leave unused
FEW, MANY = 300, 2000  # names to learn from: a language with fewer than FEW is of low resource, from MANY on of high

Pairs = dict[str, list[tuple[str, str]]]
Batch = dict[str, np.ndarray]


def english_names() -> dict[str, set[str]]:
    """By iso-codes' lists: of countries, their regions, languages and currencies."""
    lists = {
        "iso3166-1": pycountry.countries,
        "iso3166-2": pycountry.subdivisions,
        "iso639-3": pycountry.languages,
        "iso4217": pycountry.currencies,
    }
    fields = ("name", "official_name", "common_name", "inverted_name")
    return {
        domain: {getattr(entry, field) for entry in entries for field in fields if hasattr(entry, field)}
        for domain, entries in lists.items()
    }


@cache
def read() -> tuple[Pairs, Pairs]:
    """(to learn from, held out): for each language its (name, English name), those written alike left out."""
    learnt, held_out, english = {}, {}, english_names()
    for language in sorted(folder.name for folder in Path(pycountry.LOCALES_DIR).iterdir() if folder.name != "en"):
        pairs = set()
        for domain, names in english.items():
            translate = gettext.translation(domain, pycountry.LOCALES_DIR, [language], fallback=True).gettext
            pairs |= {(translate(name), name) for name in names}
        pairs = {(name, english) for name, english in pairs if name.strip().casefold() != english.strip().casefold()}
        if len(pairs) >= LEAST_NAMES:
            apart = {pair for pair in pairs if zlib.crc32(pair[0].encode()) % HELD_OUT == 0}
            learnt[language], held_out[language] = sorted(pairs - apart), sorted(apart)
    return learnt, held_out


def chosen(pairs: Pairs, languages: Sequence[str]) -> Pairs:
    """The pairs of some languages, or of all where none is named."""
    if missing := [language for language in languages if language not in pairs]:
        raise ValueError(f"no names in {', '.join(missing)}; there are: {', '.join(pairs)}")
    return {language: pairs[language] for language in languages or pairs}


def by_resources(learnt: Pairs) -> dict[str, list[str]]:
    """The languages with many names, with a middle number and with few."""
    sizes = {language: len(pairs) for language, pairs in learnt.items()}
    return {
        "high": [language for language, size in sizes.items() if size >= MANY],
        "middle": [language for language, size in sizes.items() if FEW <= size < MANY],
        "low": [language for language, size in sizes.items() if size < FEW],
    }


class Vocabulary:
    """Pieces of words, or bytes where no piece fits, of all languages and English alike (sentencepiece's BPE)."""

    def __init__(self, model: bytes):
        self.model = model
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.size = self.processor.get_piece_size()

    @classmethod
    def train(cls, pairs: Pairs, size: int) -> Vocabulary:
        """Learnt from at most 1,000 names of each language, and from the English ones."""
        random, written = np.random.default_rng(0), io.BytesIO()
        some = {language: random.permutation(np.array(names))[:1000] for language, names in pairs.items()}
        sentences = [name for names in some.values() for name in names.ravel().tolist()]
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=written,
            model_type="bpe",
            vocab_size=size,
            byte_fallback=True,
            character_coverage=0.998,
            pad_id=PADDING,
            unk_id=1,
            eos_id=END,
            bos_id=-1,
            num_threads=1,
            minloglevel=2,
        )
        return cls(written.getvalue())

    def rows(self, names: list[str], length: int, *, end: bool) -> list[list[int]]:
        """Tokens of each name, with an end if asked for, padded to a length; an empty row where they are more."""
        tokens = [row + [END] * end for row in self.processor.encode(names)]
        return [row + [PADDING] * (length - len(row)) if len(row) <= length else [] for row in tokens]

    def text(self, tokens: np.ndarray) -> str:
        """Of a row of tokens, up to its end."""
        row = tokens.tolist()
        return self.processor.decode(row[: row.index(END)] if END in row else row)


@dataclass(frozen=True)
class Examples:
    """Encoded names: `inputs` `[N, 16]` and `targets` `[N, 10]`; names of more tokens are left out."""

    inputs: np.ndarray
    targets: np.ndarray

    @classmethod
    def encode(cls, pairs: list[tuple[str, str]], vocabulary: Vocabulary) -> Examples:
        inputs = vocabulary.rows([name for name, _ in pairs], SOURCE_TOKENS, end=False)
        targets = vocabulary.rows([english for _, english in pairs], TARGET_TOKENS, end=True)
        both = [(row, target) for row, target in zip(inputs, targets, strict=True) if row and target]
        columns = zip(*both, strict=True) if both else ([], [])
        return cls(*(np.array(column, np.int32) for column in columns))

    def batch(self, chosen: np.ndarray | slice) -> Batch:
        return {"inputs": self.inputs[chosen], "targets": self.targets[chosen]}


def shares(sizes: Sequence[int], temperature: float) -> np.ndarray:
    """How often each language is drawn: its share of all names to the power 1/temperature (arXiv 1907.05019)."""
    shares = (np.array(sizes, np.float64) / np.sum(sizes)) ** (1 / temperature)
    return shares / shares.sum()


def batches(
    examples: list[Examples], size: int, temperature: float, seed: int, part: tuple[int, int] = cluster.WHOLE
) -> Iterator[Batch]:
    """Names of languages drawn by `shares`, without end; `part` of each batch."""
    random = np.random.default_rng(seed)
    inputs, targets = (np.concatenate([getattr(e, name) for e in examples]) for name in ("inputs", "targets"))
    sizes = np.array([len(e.inputs) for e in examples])
    begins = np.cumsum(sizes) - sizes
    while True:
        languages = random.choice(len(sizes), size, p=shares(sizes, temperature))
        rows = (begins[languages] + random.integers(sizes[languages]))[cluster.rows(size, part)]
        yield {"inputs": inputs[rows], "targets": targets[rows]}
