"""Streams cut for training and evaluation, against loops over single tokens."""

import json

import pytest
import torch

from fastweights.data.manifest import DataError
from fastweights.data.prepare import prepare
from fastweights.data.text.corpus import Corpus, TokenStream
from tests.data.corpora import write_wikitext

CUTS = [(101, 4, 7), (100, 4, 24), (100, 4, 25), (100, 1, 16), (17, 8, 3), (9, 2, 50)]


def stream(n, dtype=torch.int32):
    """A stream whose tokens are their own places."""
    return TokenStream(torch.arange(n, dtype=torch.int32).to(dtype))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32, torch.int64])
@pytest.mark.parametrize(("n", "batch", "length"), CUTS)
def test_segments_use_every_token_once_and_in_order(n, batch, length, dtype):
    segments = stream(n, dtype).segments(batch, length)
    size = n // batch
    read = list(segments)
    assert len(read) == len(segments) == -(-(size - 1) // length)
    rows = torch.arange(size * batch).view(batch, size)
    assert torch.equal(torch.cat([segment.inputs for segment in read], 1), rows[:, :-1])
    assert torch.equal(torch.cat([segment.targets for segment in read], 1), rows[:, 1:])
    assert segments.predictions == sum(segment.targets.numel() for segment in read)
    assert all(segment.inputs.shape == (batch, length) for segment in read[:-1])
    assert [segment.starts_epoch for segment in read] == [True] + [False] * (len(read) - 1)
    assert all(segment.inputs.dtype == segment.targets.dtype == torch.int64 for segment in read)


def test_segments_of_any_step_without_those_before():
    segments = stream(101).segments(4, 7)
    epoch = list(segments)
    for step in (0, 1, 3, 4, 9, 1000):
        expected = epoch[step % len(segments)]
        found = segments.batch_at(step)
        assert torch.equal(found.inputs, expected.inputs) and torch.equal(found.targets, expected.targets)
        assert found.starts_epoch == (step % len(segments) == 0)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32])
@pytest.mark.parametrize(("n", "batch", "length"), [(101, 4, 7), (100, 1, 16), (17, 8, 1), (1000, 3, 50)])
def test_shuffled_segments_are_everywhere(n, batch, length, dtype):
    shuffled = stream(n, dtype).shuffled(batch, length, seed=5)
    orders, firsts, seen = set(), set(), set()
    for epoch in range(60):
        read = [shuffled.batch_at(epoch * len(shuffled) + i) for i in range(len(shuffled))]
        inputs = torch.cat([segment.inputs for segment in read])
        assert all(torch.equal(segment.targets, segment.inputs + 1) for segment in read)
        assert all(segment.inputs.shape == (batch, length) and not segment.starts_epoch for segment in read)
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(length))
        (first,) = set((inputs[:, 0] % length).tolist())
        assert len(set(inputs[:, 0].tolist())) == len(inputs), "each once in an epoch"
        assert inputs.numel() + 1 + length + length * batch > n, "no batch more would have fitted in every epoch"
        orders.add(tuple(inputs[:, 0].tolist()))
        firsts.add(first)
        seen.update(inputs.flatten().tolist())
    assert len(orders) > 30 and len(firsts) > min(2, length - 1)
    assert set(range(length - 1, n - length)) <= seen, "no stretch of the text is always left out"
    assert not torch.equal(stream(n).shuffled(batch, length, seed=6).batch_at(0).inputs, shuffled.batch_at(0).inputs)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_shuffled_segments_of_any_step(world):
    shares = [stream(500).shuffled(6, 9, seed=3, rank=rank, world=world) for rank in range(world)]
    for step in (40, 3, 17, 0, 1000):
        # Of its own, without those before.
        whole = stream(500).shuffled(6, 9, seed=3).batch_at(step)
        parts = [share.batch_at(step) for share in shares]
        assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


def test_shuffled_segments_know_where_documents_begin():
    tokens = torch.arange(300, dtype=torch.int32)
    found = TokenStream(tokens, tokens % 7 == 0).shuffled(4, 10).batch_at(8)
    assert torch.equal(found.starts, found.inputs % 7 == 0)


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_ranks_share_the_rows_of_the_batch(world):
    whole = stream(500).segments(6, 9)
    shares = [stream(500).segments(6, 9, rank=rank, world=world) for rank in range(world)]
    for step in range(len(whole) + 2):
        parts = [share.batch_at(step) for share in shares]
        assert torch.equal(torch.cat([part.inputs for part in parts]), whole.batch_at(step).inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.batch_at(step).targets)
        assert {part.starts_epoch for part in parts} == {whole.batch_at(step).starts_epoch}


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize(("n", "length"), [(40, 5), (41, 5), (43, 8), (9, 8), (8, 8), (5, 8), (2, 1)])
def test_windows(n, length, stride, batch):
    if stride > length:
        return
    tokens = torch.arange(100, 100 + n)
    windows = TokenStream(tokens.to(torch.uint16)).windows(length, stride, batch=batch)
    expected, done = [], 0
    end = min(length, n - 1)
    while done < n - 1:
        expected.append((tokens[max(end - length, 0) : end], tokens[done + 1 : end + 1]))
        done, end = end, min(end + stride, n - 1)
    read = list(windows)
    assert len(read) == len(windows)
    found = [pair for window in read for pair in zip(window.inputs, window.targets, strict=True)]
    assert len(found) == len(expected)
    for (inputs, targets), (wanted_inputs, wanted_targets) in zip(found, expected, strict=True):
        assert torch.equal(inputs, wanted_inputs) and torch.equal(targets, wanted_targets)
    assert torch.equal(torch.cat([window.targets.flatten() for window in read]), tokens[1:])
    assert windows.predictions == n - 1
    assert all(len(window.inputs) <= batch for window in read[1:])


def test_batches_are_ready_for_a_model():
    for segment in stream(101).segments(4, 7):
        assert segment.inputs.is_contiguous() and segment.targets.is_contiguous()
    for window in stream(50).windows(7, 2, batch=4):
        assert window.inputs.is_contiguous() and window.targets.is_contiguous()


def test_windows_copy_nothing_but_the_batch():
    tokens = torch.arange(5000, dtype=torch.int32)
    windows = TokenStream(tokens).windows(384, batch=64)
    assert windows._later.data_ptr() == tokens.data_ptr() + 4
    assert windows._later.shape == (5000 - 385, 384)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.segments(0, 5), "batch must be a whole number of at least 1, got 0"),
        (lambda s: s.segments(4, 2.5), "length must be a whole number"),
        (lambda s: s.segments(6, 5, world=4), "batch 6 cannot be shared evenly by 4 ranks"),
        (lambda s: s.segments(4, 5, rank=2, world=2), "rank must be 0 … world - 1 = 1, got 2"),
        (lambda s: s.segments(60, 5), "take a batch of at most 50"),
        (lambda s: s.segments(4, 5).batch_at(-1), "at least 0, got -1"),
        (lambda s: s.shuffled(0, 5), "batch must be a whole number of at least 1, got 0"),
        (lambda s: s.shuffled(6, 5, world=4), "batch 6 cannot be shared evenly by 4 ranks"),
        (lambda s: s.shuffled(20, 5), "100 tokens do not give 20 segments of 5 .* take a batch of at most 19"),
        (lambda s: s.shuffled(2, 60), "100 tokens do not give 2 segments of 60 .* take shorter ones"),
        (lambda s: s.shuffled(2, 160), "100 tokens do not give 2 segments of 160 .* take shorter ones"),
        (lambda s: s.shuffled(2, 6, seed=-1), "seed must be at least 0 for shuffled segments, got -1"),
        (lambda s: s.shuffled(4, 5).batch_at(-1), "at least 0, got -1"),
        (lambda s: s.windows(4, 5), "stride 5 would leave out tokens"),
        (lambda s: s.windows(4).batch_at(97), "batch must be 0 … 95, got 97"),
        (lambda s: TokenStream(s.tokens[:1]).windows(4), "nothing to predict"),
    ],
)
def test_bad_cuts(call, message):
    with pytest.raises((ValueError, IndexError), match=message):
        call(stream(100))


@pytest.fixture
def folder(tmp_path):
    write_wikitext(tmp_path / "files")
    prepare("wikitext2", tmp_path / "files", tmp_path / "corpus", allow_other=True)
    return tmp_path / "corpus"


def test_streams_from_disk(folder):
    corpus = Corpus.load(folder)
    on_disk, in_memory = corpus.train, corpus.train.to("cpu")
    assert in_memory.tokens.dtype == torch.int32 and len(in_memory) == len(on_disk)
    for step in range(3):
        found, expected = (s.segments(3, 11).batch_at(step) for s in (on_disk, in_memory))
        assert torch.equal(found.inputs, expected.inputs) and torch.equal(found.targets, expected.targets)
    assert len(list(corpus.split("valid").windows(4))) == len(corpus.valid) - 4
    with pytest.raises(ValueError, match="unknown split 'validation'"):
        corpus.split("validation")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_on_a_gpu(folder):
    corpus = Corpus.load(folder)
    resident = corpus.train.to("cuda")
    for found, expected in zip(resident.windows(5, 2, batch=7), corpus.train.windows(5, 2, batch=7), strict=True):
        assert found.inputs.is_cuda and torch.equal(found.inputs.cpu(), expected.inputs)
        assert torch.equal(found.targets.cpu(), expected.targets)
    for found, expected in zip(resident.segments(3, 11), corpus.train.segments(3, 11), strict=True):
        assert torch.equal(found.inputs.cpu(), expected.inputs) and torch.equal(found.targets.cpu(), expected.targets)
    for step in (0, 5, 100):
        found, expected = (each.shuffled(3, 11).batch_at(step) for each in (resident, corpus.train))
        assert found.inputs.is_cuda and torch.equal(found.inputs.cpu(), expected.inputs)


def edit(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_damaged_corpora_are_not_loaded(folder, tmp_path):
    fingerprint = Corpus.load(folder, verify=True).fingerprint
    content = (folder / "test.bin").read_bytes()
    (folder / "test.bin").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert Corpus.load(folder).fingerprint == fingerprint
    with pytest.raises(DataError, match=r"test.bin was changed"):
        Corpus.load(folder, verify=True)
    (folder / "test.bin").write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"test.bin has [\d,]+ bytes"):
        Corpus.load(folder)
    (folder / "test.bin").unlink()
    with pytest.raises(DataError, match=r"test.bin is missing"):
        Corpus.load(folder)
    (folder / "test.bin").write_bytes(content)
    edit(folder, dtype="uint32")
    with pytest.raises(DataError, match=r"the manifest gives train.bin"):
        Corpus.load(folder)
    edit(folder, byteorder="big")
    with pytest.raises(DataError, match="big-endian"):
        Corpus.load(folder)
    edit(folder, format=99)
    with pytest.raises(DataError, match="format 99, this version reads 1"):
        Corpus.load(folder)
    (folder / "manifest.json").write_text('{"format": 1, "ki')
    with pytest.raises(DataError, match="not the manifest of a corpus"):
        Corpus.load(folder)
    with pytest.raises(DataError, match="nowhere, which does not exist; `fastweights data KIND"):
        Corpus.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": 3},
        {"options": None},
        {"source": []},
        {"source": {"files": [{"name": "a"}]}},
        {"vocabulary": "words"},
        {"splits": {"train": 3}},
        {"format": "1"},
        {"dtype": ["uint16"]},
    ],
)
def test_a_manifest_of_wrong_types_is_refused_in_a_sentence(folder, change):
    edit(folder, **change)
    with pytest.raises(DataError, match=r"is not the manifest of a corpus .*--force"):
        Corpus.load(folder)


@pytest.mark.parametrize(("entry", "value"), [("bytes", "12"), ("tokens", "6"), ("file", 1), ("sha256", None)])
def test_a_file_of_wrong_types_is_refused_in_a_sentence(folder, entry, value):
    splits = json.loads((folder / "manifest.json").read_text())["splits"]
    splits["valid"][entry] = value
    edit(folder, splits=splits)
    with pytest.raises(DataError, match=f"{entry} is {value!r} and not of type"):
        Corpus.load(folder)
