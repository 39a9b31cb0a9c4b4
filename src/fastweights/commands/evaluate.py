"""`fastweights eval lm` and `eval mt`: the perplexity and the BLEU score of trained models."""

import hashlib
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch

from fastweights.commands.options import AsJson, Device, option, pick_device, require, say
from fastweights.commands.results import (
    Beam,
    LanguageFolder,
    LengthPenalty,
    Split,
    TranslationFolder,
    Which,
    check_batch,
    check_names,
    keep_result,
    measuring,
    run_errors,
)
from fastweights.common.provenance import origin
from fastweights.data.manifest import DataError
from fastweights.data.text.corpus import TokenStream
from fastweights.data.text.documents import mark_documents
from fastweights.data.tokenizer import Tokenizer
from fastweights.inference.beam import Search
from fastweights.inference.translate import translate
from fastweights.training.runs.checkpoint import Checkpoint, CheckpointError
from fastweights.training.runs.saved import LanguageRun, TranslationRun
from fastweights.training.tasks import evaluate
from fastweights.training.tasks.bleu import bleu

# Sentences kept in the JSON file beside the score.
SAMPLES = 20

Data = Annotated[Path | None, option("The corpus, if it was moved since the training.", False)]


def lm(
    run: LanguageFolder,
    split: Split = "valid",
    protocol: Annotated[
        str,
        option(
            "segment: separate segments, as in validation, takes seconds; sliding: a window that moves by --stride "
            "words, takes minutes or hours; carried: each segment continues from the state of the previous one."
        ),
    ] = "segment",
    stride: Annotated[int | None, option("sliding: words between the starts of two windows.", "1")] = None,
    batch: Annotated[
        int | None, option("Windows at once, or rows of text.", "10; sliding: what fits; carried: 1")
    ] = None,
    segment: Annotated[int | None, option("Words in a segment or window.", "as in training")] = None,
    mem_len: Annotated[int | None, option("xl: words remembered. Table 4 has 15, 64, 128, 384.", "as trained")] = None,
    clamp_len: Annotated[
        int | None, option("xl: largest distance that is distinguished.", "the segment of training")
    ] = None,
    checkpoint: Which = "best",
    data: Data = None,
    text: Annotated[Path | None, option("Score this UTF-8 text instead of a split of the corpus.", False)] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Print the perplexity of a run's model and keep it as JSON in RUN/eval.

    The paper's numbers are those of `--protocol sliding`, and in Table 4 of `--protocol carried`.
    """
    with run_errors():
        check_names(checkpoint, split)
        device = pick_device(device)
        if text is not None and split != "valid":
            raise ValueError(f"--text is scored in place of a split, got --split {split} too; leave one of them out")
        opened = LanguageRun.open(run)
        scored = _of_corpus(opened, split, data) if text is None else _of_file(opened, text, data)
        if protocol == "segment" and batch is None:
            # A short text is not spread over more rows than it has segments.
            most = opened.task["eval_batch"] if text is None else max(1, len(scored.stream) // opened.segment)
            batch = min(opened.task["eval_batch"], most)
        how = evaluate.protocol(
            protocol,
            opened.model,
            opened.segment,
            carried=opened.carried,
            segment=segment,
            stride=stride,
            batch=batch,
            mem_len=mem_len,
            clamp_len=clamp_len,
            device=device,
        )
        stream = mark_documents(scored.stream, scored.tokenizer, opened.documents)
        stream = stream if device == "cpu" else stream.to(device)
        model, source = opened.load(checkpoint, device)
    say(f"scoring {len(stream):,} tokens of {scored.split} with {source.folder.name}")
    start = time.monotonic()
    faster = "; --stride N scores N of them in each window, N times as fast" if how.stride == 1 else ""
    with measuring("tokens", faster) as report:
        score = evaluate.measure(model, stream, how, report)
        if not math.isfinite(score.loss):
            raise CheckpointError(
                f"the loss of {source.folder} on {scored.split} is {score.loss}, which has no perplexity; "
                "train again with a lower --lr and --fresh"
            )
    wall = time.monotonic() - start
    about = {
        **_about(run, source, scored.split, scored.name, scored.fingerprint),
        "protocol": asdict(how),
        "documents": opened.documents,
    }
    if how.carry:
        if how.mem_len is not None:
            model.set_memory(how.mem_len, how.clamp_len)
        about["state_size"] = model.state_size(how.segment)
    numbers = {"ppl": score.ppl if math.isfinite(score.ppl) else str(score.ppl), "loss": score.loss}
    of_text = _bits_of_text(score.bits, scored.counts)
    numbers |= {"bits_per_token": score.bits, **{f"bits_per_{unit}": bits for unit, bits in of_text.items()}}
    numbers |= {"tokens": score.tokens, "wall_s": wall}
    record = {**about, **numbers, "tokens_per_s": score.tokens / wall, **origin(device), "device": device}
    every = {scored.tokenizer.unit: score.bits, **of_text}
    lines = [
        f"perplexity {score.ppl:.3f}, " + ", ".join(f"{bits:.4f} bits per {unit}" for unit, bits in every.items()),
        f"{score.tokens:,} tokens scored in {wall:.1f} s, {score.tokens / wall:,.0f} tokens/s",
    ]
    keep_result(run / "eval" / f"{scored.split}-{how.slug}-{_kind(source)}.json", record, lines, as_json)


def mt(
    run: TranslationFolder,
    split: Split = "valid",
    beam: Beam = 4,
    length_penalty: LengthPenalty = 0.6,
    batch: Annotated[int | None, option("Sentences at once.", "as many as suit the device")] = None,
    checkpoint: Which = "best",
    data: Data = None,
    out: Annotated[Path | None, option("Also write the translations to this file, one per line.", "nowhere")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Translate a split, print its BLEU score with sacreBLEU's signature, and keep it as JSON in RUN/eval.

    The score is computed on plain text, against the unmodified references.
    """
    with run_errors():
        require("sacrebleu")
        check_names(checkpoint, split)
        check_batch(batch)
        Search(beam=beam, length_penalty=length_penalty)
        device = pick_device(device)
        opened = TranslationRun.open(run)
        corpus = opened.corpus(data)
        pairs = corpus.split(split)
        model, source = opened.load(checkpoint, device)
    say(f"translating {len(pairs):,} sentences of {split} with {source.folder.name}")
    start = time.monotonic()
    how: dict[str, Any] = {"beam": beam, "length_penalty": length_penalty}
    with measuring("sentences") as report:
        translations = translate(model, corpus.tokenizer, pairs.sources, **how, batch=batch, report=report)
    wall = time.monotonic() - start
    score = bleu(translations, pairs.targets)
    samples = list(zip(pairs.sources[:SAMPLES], translations[:SAMPLES], pairs.targets[:SAMPLES], strict=True))
    record = {
        **_about(run, source, split, corpus.manifest["name"], corpus.fingerprint),
        **how,
        "bleu": score.score,
        "signature": score.signature,
        "sentences": len(translations),
        "wall_s": wall,
        "sentences_per_s": len(translations) / wall,
        "samples": [dict(zip(("source", "translation", "reference"), sample, strict=True)) for sample in samples],
        **origin(device),
        "device": device,
    }
    lines = [
        f"BLEU {score.score:.2f}  ({score.signature})",
        f"{len(translations):,} sentences in {wall:.1f} s, {len(translations) / wall:.1f} a second",
    ]
    path = run / "eval" / f"{split}-beam{beam}-penalty{length_penalty:g}-{_kind(source)}.json"
    more = {} if out is None else {out: "".join(f"{line}\n" for line in translations)}
    keep_result(path, record, lines, as_json, more)


class _Scored(NamedTuple):
    """A text to score: its tokens, how files and results name it, and its length in tokens, characters and bytes."""

    stream: TokenStream
    tokenizer: Tokenizer
    split: str
    name: str
    fingerprint: str
    counts: dict[str, Any]


def _of_corpus(run: LanguageRun, split: str, data: Path | None) -> _Scored:
    corpus = run.corpus(data)
    counts = corpus.manifest["splits"][split]
    return _Scored(corpus.split(split), corpus.tokenizer, split, corpus.manifest["name"], corpus.fingerprint, counts)


def _of_file(run: LanguageRun, path: Path, data: Path | None) -> _Scored:
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start:,}") from None
    tokenizer = run.tokenizer(data)
    tokens = tokenizer.encode(text)
    if len(tokens) < 2:
        raise DataError(f"{path} has {len(tokens)} tokens, and at least 2 are needed: one to read and one to predict")
    counts = {"tokens": len(tokens), "characters": len(text), "text_bytes": len(text.encode())}
    fingerprint = hashlib.sha256(content).hexdigest()[:16]
    return _Scored(TokenStream(torch.tensor(tokens)), tokenizer, path.stem, path.name, fingerprint, counts)


def _bits_of_text(bits: float, counts: dict[str, Any]) -> dict[str, float]:
    """Return bits per character and per byte from those per token: models of other tokens can be compared by them."""
    sizes = {"character": counts.get("characters"), "byte": counts.get("text_bytes")}
    return {unit: bits * counts["tokens"] / size for unit, size in sizes.items() if size}


def _about(run: Path, source: Checkpoint, split: str, corpus: str, fingerprint: str) -> dict[str, Any]:
    about = {"run": str(run), "checkpoint": source.folder.name, "step": source.step, "split": split}
    return {**about, "corpus": corpus, "fingerprint": fingerprint}


def _kind(source: Checkpoint) -> str:
    return "best" if source.folder.name.startswith("best") else "last"
