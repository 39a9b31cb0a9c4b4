"""The compiled loss, and the loop on a GPU: no waiting inside an update, the same losses, going on."""

import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from fastweights.models.language_model import LanguageModel
from fastweights.models.presets import PRESETS
from fastweights.models.translation import TranslationModel
from fastweights.models.translation_presets import PRESETS as MT_PRESETS
from fastweights.training.engine.distributed import launch
from fastweights.training.engine.learner import Learner
from fastweights.training.runs.signals import Interrupted
from tests.training.small_pairs import run as run_translation
from tests.training.small_pairs import small_pairs, small_translation
from tests.training.small_text import MIXERS
from tests.training.tiny import TinyBlocks, TinyTask, config, losses, run

from .test_loop import StopsAt

pytestmark = [
    # torch's compiler imports what torch deprecates, advertises TF32, and captures an empty graph to begin with.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]


def agree(ours, theirs, rel):
    assert dict(losses(ours)) == pytest.approx(dict(losses(theirs)), rel=rel)


@pytest.mark.slow
def test_compiled_losses(tmp_path):
    run(tmp_path / "eager", TinyTask(dropout=0.0))
    run(tmp_path / "compiled", TinyTask(dropout=0.0), compile="default")
    agree(tmp_path / "compiled", tmp_path / "eager", 1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
@pytest.mark.parametrize("mixer", MIXERS)
def test_blocks_are_compiled_once_for_all(mixer):
    """And not at all where that is not wanted, as for the odd segment at the end of an epoch."""
    sizes = {"d_model": 8, "n_heads": 2, "d_ff": 8, "n_layers": 12, "vocab_size": 20, "cutoffs": (5,), "dropout": 0.0}
    model = LanguageModel(PRESETS["tiny"](mixer, context="carried" if mixer == "xl" else "limited", **sizes))
    tokens, counter = torch.randint(20, (2, 9)), CompileCounter()
    torch._dynamo.reset()
    torch.manual_seed(1)
    expected, _ = model.loss(tokens[:, :-1], tokens[:, 1:])
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    torch.manual_seed(1)
    nll, _ = model.loss(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(nll, expected)
    nll.sum().backward()
    with torch.compiler.set_stance("force_eager"):
        model.loss(tokens[:, :-2], tokens[:, 1:-1])
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
def test_layers_of_translation_are_compiled_once_for_all_lengths():
    sizes = {"d_model": 8, "n_heads": 2, "d_ff": 8, "encoder_layers": 3, "decoder_layers": 3, "dropout": 0.0}
    model = TranslationModel(MT_PRESETS["tiny"]("linear", vocab_size=20, **sizes))
    counter = CompileCounter()
    torch._dynamo.reset()
    for rows, source, target in ((3, 7, 5), (4, 9, 12), (2, 24, 16)):
        tokens, following = torch.randint(4, 20, (rows, source)), torch.randint(4, 20, (rows, target))
        mask = torch.arange(source) < torch.arange(source - rows, source).unsqueeze(1)
        inputs = (tokens, mask, following, following)
        with torch.compiler.set_stance("force_eager"):
            expected, _ = model.loss(*inputs)
        for layer in (*model.encoder, *model.decoder):
            layer.compile(backend=counter, fullgraph=True, dynamic=True)
        losses, _ = model.loss(*inputs)
        torch.testing.assert_close(losses, expected)
        losses.sum().backward()
    assert counter.frame_count == 2


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_never_waits_for_the_device(accumulate, optimizer):
    settings = config(accelerator="cuda", precision="bf16-mixed", accumulate=accumulate, optimizer=optimizer)
    task = TinyBlocks()
    learner = Learner(launch(settings), task, settings)
    for _ in range(6):
        learner.advance()
    with warnings.catch_warnings():
        # It says that it may overlook some.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            learner.advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert learner.read()["steps"] == 10 and learner.broken_at() is None


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"strategy": "ddp"}, {"strategy": "fsdp"}, {"accumulate": 2}])
def test_cuda_learns_what_the_cpu_learns(tmp_path, changes):
    accumulate = {"accumulate": changes.get("accumulate", 1)}
    run(tmp_path / "cpu", TinyTask(dropout=0.0), **accumulate)
    run(tmp_path / "cuda", TinyTask(dropout=0.0), accelerator="cuda", **changes)
    agree(tmp_path / "cuda", tmp_path / "cpu", 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_compiled_on_cuda(tmp_path, mode, accumulate):
    changes = {"accelerator": "cuda", "accumulate": accumulate}
    run(tmp_path / "eager", TinyTask(dropout=0.0), **changes)
    run(tmp_path / "compiled", TinyTask(dropout=0.0), compile=mode, **changes)
    agree(tmp_path / "compiled", tmp_path / "eager", 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", [None, "default"])
@pytest.mark.parametrize("carried", [True, False])
def test_captured_on_cuda(tmp_path, carried, mode, accumulate):
    changes = {"accelerator": "cuda", "accumulate": accumulate, "steps": 30}
    run(tmp_path / "eager", TinyTask(dropout=0.0, carried=carried), **changes)
    run(tmp_path / "captured", TinyTask(dropout=0.0, carried=carried), graph=True, compile=mode, **changes)
    agree(tmp_path / "captured", tmp_path / "eager", 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("attention", "mode"), [("softmax", None), ("linear", None), ("performer", None), ("linear", "default")]
)
def test_translation_captured_on_cuda(tmp_path, attention, mode):
    corpus = small_pairs(tmp_path / "corpus")
    task, _ = small_translation(corpus)
    assert len({task.batch(index, 0, 1).source.shape for index in range(task.batches_per_epoch)}) > 2
    changes = {"accelerator": "cuda", "steps": 60, "dropout": 0.0, "eval_every": 60}
    run_translation(corpus, tmp_path / "eager", attention, **changes)
    run_translation(corpus, tmp_path / "captured", attention, graph=True, compile=mode, **changes)
    agree(tmp_path / "captured", tmp_path / "eager", 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_captured_on_cuda(tmp_path, weight_decay):
    changes = {"optimizer": "muon", "weight_decay": weight_decay, "steps": 30}
    run(tmp_path / "cpu", TinyBlocks(dropout=0.0), **changes)
    for name, graph in (("eager", False), ("captured", True)):
        run(tmp_path / name, TinyBlocks(dropout=0.0), accelerator="cuda", graph=graph, **changes)
    agree(tmp_path / "captured", tmp_path / "eager", 1e-3)
    # On a GPU the matrices are turned in bfloat16.
    agree(tmp_path / "eager", tmp_path / "cpu", 5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_stretches_on_cuda(tmp_path, precision, graph):
    changes = {"accelerator": "cuda", "precision": precision, "graph": graph, "steps": 30}
    run(tmp_path / "whole", **changes)
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", StopsAt(17, 15), **changes)
    torch.cuda.manual_seed(99)
    run(tmp_path / "parts", **changes)
    agree(tmp_path / "parts", tmp_path / "whole", 1e-5)


@pytest.mark.gpu
def test_late_news_of_divergence_name_the_step_and_leave_the_weights(tmp_path):
    from fastweights.training.engine.diagnosis import Diverged

    with pytest.raises(Diverged) as stopped:
        run(tmp_path, TinyTask(poison=6), accelerator="cuda", log_every=12, eval_every=None, checkpoint_every=None)
    assert stopped.value.step == 7
    assert all(not health.broken for health in stopped.value.report if health.kind == "parameter")


@pytest.fixture(autouse=True)
def _cuda(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
