"""States of streams as things: snapshots, rolling back, files of several streams, fewer bits, shared prefixes."""

import json
import multiprocessing

import pytest
import torch

from fastweights.benchmarks import states
from fastweights.inference.compression import FORMATS, Compression, Packed
from fastweights.inference.prefixes import PrefixStore
from fastweights.inference.stream import Stream
from tests.inference.test_stream import CONSTANT, MODELS, text
from tests.training.small_text import random_model


def bits_of(stream):
    """Every bit that a stream has of its past."""
    snapshot = stream.snapshot()
    layers = [x for layer in snapshot.state.layers for x in layer.tensors().values()]
    return [x.clone() for x in (*layers, snapshot.state.position, snapshot.hidden)]


def same_bits(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{"snapshot_every": 4}, {"snapshot_last": 3}], ids=str)
def test_rolled_back_is_never_fed(name, options):
    """The states and all that follows are those of a stream that was fed the same parts up to there, bit for bit."""
    model, tokens = random_model(**MODELS[name]), text()
    stream = Stream(model, **options)
    parts = tokens.split([1, 6, 5, 1, 1, 6, 10])
    for part in parts:
        stream.feed(part)
    to = stream.snapshots[-2]
    stream.roll_back(to)
    other, read = Stream(model, **options), 0
    for part in parts:
        if read < to:
            other.feed(part[: to - read])
            read += len(part)
    assert stream.position == other.position == to
    assert same_bits(bits_of(stream), bits_of(other))
    assert torch.equal(stream.log_probs, other.log_probs)
    assert torch.equal(stream.feed(tokens[to:]), other.feed(tokens[to:]))
    assert same_bits(bits_of(stream), bits_of(other))


def test_which_snapshots_are_kept():
    stream = Stream(random_model(), snapshot_every=10, snapshot_last=2)
    assert stream.snapshots == ()
    for count in (3, 4, 5, 1, 9, 1):
        stream.feed(text(count))
    # Multiples of ten, and before the last two calls.
    assert stream.position == 23 and stream.snapshots == (10, 13, 20, 22)
    assert stream.snapshot_bytes == 4 * stream.nbytes
    fork = stream.fork()
    stream.roll_back(13)
    assert stream.position == 13 and stream.snapshots == (10, 13)
    with pytest.raises(ValueError, match="no snapshot at position 20; those kept are at 10, 13"):
        stream.roll_back(20)
    stream.roll_back(13)
    # A fork has its own.
    fork.roll_back(20)
    assert fork.position == 20
    fork.drop_snapshots(before=11)
    assert fork.snapshots == (13, 20)
    fork.drop_snapshots()
    assert fork.snapshots == ()
    with pytest.raises(ValueError, match="none: give snapshot_every or snapshot_last"):
        fork.roll_back(3)
    with pytest.raises(ValueError, match="at least 0, got snapshot_every = -1"):
        Stream(random_model(), snapshot_every=-1)


def test_rolled_back_to_the_beginning():
    stream = Stream(random_model(), snapshot_last=1)
    stream.feed([1, 2])
    stream.roll_back(0)
    assert stream.position == 0 and stream.nbytes == 0
    with pytest.raises(ValueError, match="nothing has been fed yet"):
        _ = stream.log_probs


@pytest.mark.parametrize("name", MODELS)
def test_forks_and_snapshots_share_memory(name):
    stream = Stream(random_model(**MODELS[name]))
    stream.feed(text(9))
    before, bits = stream.snapshot(), bits_of(stream)
    fork = stream.fork()
    ours, theirs = (x.snapshot().state.layers[0].tensors() for x in (stream, fork))
    assert all(ours[field].data_ptr() == theirs[field].data_ptr() for field in ours)
    fork.feed(text(5))
    assert same_bits(bits_of(stream), bits)
    stream.feed([3])
    stream.roll_back(before)
    assert same_bits(bits_of(stream), bits)


@pytest.mark.parametrize("name", MODELS)
def test_each_is_what_one_by_one_gives(name):
    model, tokens = random_model(**MODELS[name]), text(12)
    whole, single = Stream(model), Stream(model)
    each = whole.feed_each(tokens)
    torch.testing.assert_close(each, torch.stack([single.feed([token]) for token in tokens]))
    torch.testing.assert_close(whole.log_probs, each[-1])


@pytest.mark.parametrize("options", [{}, {"state_format": "int8", "error_feedback": True}], ids=str)
def test_several_streams_in_one_file(tmp_path, options):
    model = random_model(normalization="both", short_conv=3)
    streams = {name: Stream(model, **options) for name in ("one", "a/b")}
    for count, stream in enumerate(streams.values(), 5):
        stream.feed(text(count))
    Stream.save_all(tmp_path / "both", streams)
    loaded = Stream.load_all(model, tmp_path / "both")
    assert list(loaded) == list(streams)
    for name, stream in streams.items():
        assert same_bits(bits_of(loaded[name]), bits_of(stream))
        assert torch.equal(loaded[name].feed([3, 1]), stream.feed([3, 1]))
        # What follows is kept in as few bits as what came before.
        assert same_bits(bits_of(loaded[name]), bits_of(stream))
    with pytest.raises(ValueError, match=r"several streams \('one', 'a/b'\); Stream.load_all"):
        Stream.load(model, tmp_path / "both")
    with pytest.raises(ValueError, match="of one model, got 2"):
        Stream.save_all(tmp_path / "no", {"one": stream, "other": Stream(random_model())})


def test_files_of_the_first_format_still_load(tmp_path):
    from safetensors.torch import load_file, save_file

    model = random_model()
    stream = Stream(model)
    stream.feed(text(7))
    stream.save(tmp_path / "new")
    tensors = {name.removeprefix("stream/"): x for name, x in load_file(tmp_path / "new").items()}
    save_file(tensors, tmp_path / "old", {"stream": "1", "model": json.dumps(model.config.to_dict())})
    assert same_bits(bits_of(Stream.load(model, tmp_path / "old")), bits_of(stream))


# The spacing of numbers in each format, relative to the largest of a row.
STEPS = {"bf16": 2**-8, "fp8": 2**-4, "int8": 0.5 / 127}


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_is_to_the_nearest(format):
    x = torch.randn(3, 5, 40, dtype=torch.float64)
    x[0, 0], x[1, 1, 3] = 0, 1e6
    largest = x.abs().amax(-1, keepdim=True)
    once, twice = (Packed.of(x, FORMATS[format], rest).unpack(torch.float64) for rest in (False, True))
    assert ((once - x).abs() <= STEPS[format] * largest).all()
    # What was lost is at most a step, of which at most a step is lost again.
    assert ((twice - x).abs() <= 1.01 * STEPS[format] ** 2 * largest).all()
    assert (once[0, 0] == 0).all() and not torch.equal(once, x)
    # What fits is kept exactly.
    assert torch.equal(Packed.of(once, FORMATS[format]).unpack(torch.float64).sign(), once.sign())


@pytest.mark.parametrize("format", FORMATS)
def test_small_changes_add_up_with_error_feedback(format):
    """A change of less than half a step is lost every time, unless what is lost is kept."""
    size = {"bf16": 1e-3, "fp8": 1e-2, "int8": 1e-3}[format]
    errors = []
    for feedback in (False, True):
        compression, W = Compression(format, feedback), torch.ones(1, 1, 1, 2)
        for _ in range(200):
            W = compression.round(W + size * torch.tensor([0.0, -1.0])).unpack(torch.float32)
        errors.append((W[..., 1] - (1 - 200 * size)).abs().item())
    assert errors[0] > 50 * size and errors[1] < 5 * size


@pytest.mark.parametrize("name", CONSTANT)
def test_a_stream_in_fewer_bits(name):
    model, tokens = random_model(**MODELS[name]).float(), text(40)
    exact = Stream(model).feed_each(tokens).exp()
    last = None
    for format in ("fp8", "int8", "bf16"):
        stream = Stream(model, state_format=format)
        rough = torch.stack([stream.feed([token]) for token in tokens]).exp()
        # The first word is predicted before anything is rounded.
        torch.testing.assert_close(rough[0], exact[0])
        error = (rough - exact).abs().max().item()
        assert 0 < error < 0.1 and (last is None or error < last)
        last = error
        kept = Stream(model, state_format=format, error_feedback=True)
        close = torch.stack([kept.feed([token]) for token in tokens]).exp()
        assert (close - exact).abs().max() < error / 4
        assert stream.nbytes < kept.nbytes <= Stream(model, kept.snapshot()).nbytes


def test_the_benchmark_reads_as_streams_do(monkeypatch):
    monkeypatch.setattr(states, "_BLOCK", 7)
    monkeypatch.setattr(states, "_TIMED", 19)
    model, tokens = random_model(normalization="both").float(), text(20)
    found = states.losses(model, tokens)
    for way, row in zip(states.WAYS, found, strict=True):
        options = {} if way is None else {"state_format": way.format, "error_feedback": way.error_feedback}
        stream = Stream(model, **options)
        log_probs = torch.stack([stream.feed([token]) for token in tokens[:-1]])
        torch.testing.assert_close(row, -log_probs.gather(1, tokens[1:, None])[:, 0], rtol=1e-5, atol=1e-5)
        size, _ = states._timed(model, tokens, way)
        assert size == stream.nbytes


def test_a_format_that_does_not_fit():
    with pytest.raises(ValueError, match=r"state_format 'int4'.*bf16.*fp8.*int8"):
        Stream(random_model(), state_format="int4")
    with pytest.raises(ValueError, match="for fast weights, got mixer 'softmax'"):
        Stream(random_model(mixer="softmax"), state_format="int8")
    with pytest.raises(ValueError, match="error_feedback = True is about a state_format"):
        Stream(random_model(), error_feedback=True)


def test_a_prefix_is_read_once(tmp_path, monkeypatch):
    model, tokens = random_model(), text(50).tolist()
    store = PrefixStore(model, tmp_path, every=8)
    read = []
    forward = type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda self, x, *more: read.append(x.shape[1]) or forward(self, x, *more)
    )
    first = store.open(tokens[:30])
    assert sum(read) == 30 and first.position == 30 and store.longest(tokens) == 24
    read.clear()
    second = store.open([*tokens[:24], *tokens[40:]])
    assert sum(read) == 10 and second.position == 34
    torch.testing.assert_close(second.log_probs, Stream(model).feed([*tokens[:24], *tokens[40:]]))
    read.clear()
    # The same again, in this process and in one that finds it on disk; a stream of it has a future of its own.
    first.feed([1, 2, 3])
    read.clear()
    for again in (store, PrefixStore(model, tmp_path, every=8)):
        assert same_bits(bits_of(again.open(tokens[:30])), bits_of(PrefixStore(model, every=8).open(tokens[:30])))
    assert sum(read) == 2 * 30
    # Other tokens, weights or roundings share nothing.
    assert store.longest([9, *tokens[1:]]) == 0
    assert PrefixStore(random_model(n_layers=3), tmp_path, every=8).longest(tokens) == 0
    assert PrefixStore(model, tmp_path, every=8, state_format="int8").longest(tokens) == 0
    with torch.no_grad():
        model.blocks[0].mixer.out.weight += 1
    assert PrefixStore(model, tmp_path, every=8).longest(tokens) == 0
    with pytest.raises(ValueError, match="tokens are empty"):
        store.open([])
    with pytest.raises(ValueError, match="every must be at least 1"):
        PrefixStore(model, every=0)


def test_the_least_recently_used_prefixes_go_first(tmp_path):
    model = random_model()
    size = Stream(model)
    size.feed([1])
    store = PrefixStore(model, tmp_path, memory_bytes=2 * size.nbytes)
    for token in (1, 2, 1, 3):
        store.open([token])
    assert len(store._held) == 2 and store.nbytes <= store.memory_bytes
    # On disk there is room for all of them, until there is not.
    assert [store.longest([token]) for token in (1, 2, 3)] == [1, 1, 1]
    (one, *_) = files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    store.disk_bytes = 2 * one.stat().st_size
    other = PrefixStore(model, tmp_path, memory_bytes=0, disk_bytes=store.disk_bytes)
    for token in (2, 3, 4):
        other.open([token])
    assert [other.longest([token]) for token in (1, 2, 3, 4)] == [0, 0, 1, 1]
    # A file that is not whole is read again from the text.
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert other.open([4]).position == 1


def open_prefixes(seed, folder):
    """Open texts that other processes open and drop at the same time."""
    model, generator = random_model(), torch.Generator().manual_seed(seed)
    for length in torch.randint(1, 12, (25,), generator=generator).tolist():
        tokens = [3] * length + [seed % 2]
        store = PrefixStore(model, folder, every=2, memory_bytes=0, disk_bytes=6000)
        torch.testing.assert_close(store.open(tokens).log_probs, Stream(model).feed(tokens))


def test_several_processes_share_a_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=open_prefixes, args=(seed, tmp_path)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    # Each drops files before it looks again, so there may be one of each too many.
    assert 0 < sum(path.stat().st_size for path in tmp_path.iterdir()) <= 6000 + 3 * 2000
