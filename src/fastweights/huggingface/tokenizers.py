"""Our tokenizers as fast tokenizers of transformers: the same numbers for the same text."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fastweights.data import tokenizer as ours
from fastweights.data.pairs.bpe import EOS, PairTokenizer

# Beside the vocabulary, in this order: see `FastWeightConfig`.
PAD, START = "<|pad|>", "<|endoftext|>"


def fast_tokenizer(tokenizer: ours.Tokenizer) -> Any:
    """Return a `PreTrainedTokenizerFast` that gives the numbers of this tokenizer.

    Those of language models pad on the left, with a token beside the vocabulary, and have one more beside it, which
    begins and ends texts. Those of translation models add the end of the sentence.
    """
    if isinstance(tokenizer, PairTokenizer):
        pad, start, end, unknown = PairTokenizer.specials
        special = {"pad_token": pad, "bos_token": start, "eos_token": end, "unk_token": unknown}
        return PreTrainedTokenizerFast(tokenizer_object=_pairs(tokenizer), padding_side="right", **special)
    build = {"words": _words, "bpe": _pieces, "characters": _characters, "bytes": _bytes}[tokenizer.kind]
    inner = build(tokenizer)
    inner.add_special_tokens([PAD, START])
    special = {"pad_token": PAD, "bos_token": START, "eos_token": START}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, padding_side="left", clean_up_tokenization_spaces=False, **special
    )


def _words(tokenizer: Any) -> Tokenizer:
    unknown = None if tokenizer.unknown is None else ours.UNKNOWN
    numbers = {word: number for number, word in enumerate(tokenizer.words)}
    inner = Tokenizer(models.WordLevel(numbers, **({} if unknown is None else {"unk_token": unknown})))
    inner.normalizer = normalizers.Replace(Regex("\r\n|\r|\n"), f" {ours.EOS} ")
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    between = decoders.WordPiece(prefix="\0", cleanup=False)
    inner.decoder = decoders.Sequence([between, decoders.Fuse(), decoders.Replace(Regex(f" ?{ours.EOS} ?"), "\n")])
    return inner


def _pieces(tokenizer: Any) -> Tokenizer:
    return Tokenizer.from_str(tokenizer.dump().decode())


def _characters(tokenizer: Any) -> Tokenizer:
    names = [chr(number) for number in range(128)] + [f"<0x{number:02X}>" for number in range(128, 256)]
    numbers = {name: number for number, name in enumerate([*names, *tokenizer.characters])}
    inner = Tokenizer(models.BPE(numbers, [], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return inner


def _bytes(tokenizer: Any) -> Tokenizer:
    inner = Tokenizer(models.BPE(dict(ours.byte_letters()), []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _pairs(tokenizer: PairTokenizer) -> Tokenizer:
    inner = _pieces(tokenizer)
    # The first word of a sentence is written like every other, with a space before it.
    inner.normalizer = normalizers.Prepend(" ")
    inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    end = PairTokenizer.specials[EOS]
    inner.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, EOS)])
    return inner
