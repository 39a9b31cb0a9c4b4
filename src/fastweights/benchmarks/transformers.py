"""`fastweights bench transformers`: models of transformers with our operators bound into them, and without.

Without, transformers runs on flash-linear-attention where that is installed, and on plain PyTorch otherwise; every row
says which. Also measured is a model that computes nothing between its projections, with linear layers as in ours: no
operator can make it faster.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Annotated, Any

import torch
from rich.table import Table
from torch import Tensor

from fastweights.benchmarks.record import Out, Record, Repeats
from fastweights.benchmarks.timing import failure_noted, seconds
from fastweights.commands.options import AsJson, Device, chosen_names, input_errors, option, pick_device
from fastweights.common.allocator import keep_freed_memory
from fastweights.common.provenance import installed
from fastweights.compat.transformers import SLOTS, Binding, patch

SEED = 0
VOCABULARY = 1000
DECODED = 32

# All have 4 layers and 1,000 words: what repeats would add nothing.
SHARED = {"vocab_size": VOCABULARY, "num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
LAYERS = ["linear_attention"] * 3 + ["full_attention"]


def qwen(width: int, hidden: int, heads: int, head_dim: int, linear_heads: int, linear_head_dim: int) -> dict[str, Any]:
    """Return the sizes of a model of the architecture of Qwen3.5."""
    sizes = {"hidden_size": width, "intermediate_size": hidden, "head_dim": head_dim}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 2}
    sizes |= {f"linear_num_{part}_heads": linear_heads for part in ("key", "value")}
    return sizes | {f"linear_{part}_head_dim": linear_head_dim for part in ("key", "value")}


KIMI = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}
KIMI |= {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
KIMI |= {"linear_num_heads": 4, "linear_head_dim": 64}
# By name and width: the module of transformers, the name of the configuration, and its sizes.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # The widths of Qwen3.5-0.8B.
    "qwen3.5-1024": ("qwen3_5", "qwen3_5_text", qwen(1024, 3584, 8, 256, 16, 128)),
    "qwen3.5-256": ("qwen3_5", "qwen3_5_text", qwen(256, 896, 4, 64, 8, 64)),
    "kimi-linear-256": ("kimi_linear", "kimi_linear", {**KIMI, "mlp_layer_types": ["dense"] * 4}),
}


def _no_rule(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    # Everything has a gradient, as it has in the rule.
    y = value * beta.unsqueeze(-1) + (query.mean() + key.mean() + g.mean())
    return y, y.new_zeros(len(y), value.shape[2], key.shape[3], value.shape[3])


def _no_convolution(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


@contextmanager
def nothing_between_projections(model: str) -> Iterator[None]:
    """Bind functions that compute nothing in the place of rule and convolution."""
    with patch(model) as bound:
        bindings: list[Binding] = [binding for binding in bound.bindings if binding.what in SLOTS]
        for binding in bindings:
            setattr(binding.owner, binding.name, _no_rule if "rule" in binding.what else _no_convolution)
        try:
            yield
        finally:
            for binding in bindings:
                setattr(binding.owner, binding.name, binding.original)


def steps(model: Any, length: int, batch: int) -> dict[str, Callable[[], float]]:
    """Return what is measured, by name: each does it once and returns seconds."""
    prompt = torch.randint(3, VOCABULARY, (1, length), device=model.device)
    rows = torch.randint(3, VOCABULARY, (batch, length), device=model.device)

    @torch.no_grad()
    def prefill() -> float:
        return seconds(lambda: model(prompt, logits_to_keep=1), model.device)

    def training() -> float:
        model.zero_grad()
        return seconds(lambda: model(rows, labels=rows, use_cache=False).loss.backward(), model.device)

    @torch.no_grad()
    def decoding() -> float:
        output = model(prompt[:, :64])

        def decode() -> None:
            nonlocal output
            for _ in range(DECODED):
                word = output.logits[:, -1:].argmax(-1)
                output = model(word, past_key_values=output.past_key_values)

        return seconds(decode, model.device) / DECODED

    return {"prefill": prefill, "training step": training, "decoding": decoding}


def measure(label: str, length: int, batch: int, repeats: int, device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return the median ms of every step, taking turns: transformers', ours, and nothing between projections."""
    name, kind, sizes = MODELS[label]
    transformers = import_module("transformers")
    torch.manual_seed(SEED)
    config = transformers.AutoConfig.for_model(kind, **SHARED, layer_types=LAYERS, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(device, dtype)
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "fallback": nullcontext,
        "fastweights": lambda: patch(name),
        "nothing": lambda: nothing_between_projections(name),
    }
    rows = []
    for what, step in steps(model, length, batch).items():
        row: dict[str, Any] = {"model": label, "what": what, "length": 1 if what == "decoding" else length}
        row |= {"batch": batch if what == "training step" else 1, "dtype": str(dtype).removeprefix("torch.")}
        row |= installed("transformers", "fla-core")
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(repeats + 1):
            for way, bound in ways.items():
                if f"{way}_failure" in row:
                    continue
                noted = failure_noted(row, f"{way}_failure") if way == "fallback" else nullcontext()
                with noted, bound():
                    taken = step()
                    if turn:
                        times[way].append(taken)
        row |= {f"{way}_ms": 1e3 * statistics.median(taken) for way, taken in times.items() if taken}
        if "fallback_ms" in row:
            row["speedup"] = row["fallback_ms"] / row["fastweights_ms"]
            row["most"] = row["fallback_ms"] / row["nothing_ms"]
        rows.append(row)
    return rows


@input_errors((ValueError, OSError, ImportError))
def run(
    out: Out = None,
    models: Annotated[str, option("Models, by name and width.")] = ",".join(MODELS),
    length: Annotated[int, option("Tokens of a prompt and of a row in training.")] = 512,
    batch: Annotated[int, option("Rows in training.")] = 1,
    device: Device = "auto",
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Time models of transformers with our operators bound into them and without: float32, on a GPU bfloat16."""
    names = chosen_names(MODELS, models, "model")
    device = pick_device(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    # For the fallback as well: otherwise new pages, which the system may be slow to give, take longer than the models.
    keep_freed_memory()
    record = Record("transformers", device, SEED, out, as_json)
    for name in names:
        record.console.print(f"measuring {name}", style="dim")
        record.add(*measure(name, length, batch, repeats, device, dtype))
    theirs = "flash-linear-attention" if "fla-core" in record.rows[0] else "plain PyTorch"
    title = f"{length} tokens, {record.rows[0]['dtype']}; transformers computes with {theirs}"
    table = Table("model", "", "transformers ms", "fastweights ms", "speed-up", "at most", title=title)
    for row in record.rows:
        keys = ("fallback_ms", "fastweights_ms", "speedup", "most")
        table.add_row(row["model"], row["what"], *(f"{row[key]:.2f}" if key in row else "failed" for key in keys))
    record.finish(table, "at most: a model that computes nothing between its projections")
