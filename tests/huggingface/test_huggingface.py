"""Our models in transformers: the same numbers as without it, however they are read and whatever loads them."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fastweights as fw
from fastweights.cli import app
from fastweights.data.pairs.bpe import BOS, EOS, PairTokenizer
from fastweights.data.tokenizer import TOKENIZERS
from fastweights.inference.beam import beam_search
from fastweights.models.language_model import LanguageModelConfig
from fastweights.models.translation_config import TranslationModelConfig
from fastweights.training.runs.saved import TranslationRun
from tests.test_mt_cli import train_mt
from tests.training.small_pairs import small_pairs

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

from fastweights.huggingface import (  # noqa: E402
    FastWeightConfig,
    FastWeightForCausalLM,
    FastWeightForSeq2SeqLM,
    FastWeightTranslationConfig,
    fast_tokenizer,
)
from fastweights.huggingface.cache import FastWeightCache  # noqa: E402

PROMPTS = ["The film was released in", "In 1920"]
V = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "demo"
    result = CliRunner().invoke(app, ["export", "hf", "demo", str(out)])
    assert result.exit_code == 0, result.output
    assert "FastWeightForCausalLM" in result.output
    return out


@pytest.fixture(scope="module")
def demo(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder), tokenizer, fw.load("demo")


def small(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 48, "dropout": 0.0, "init_std": 0.3}
    network = LanguageModelConfig(**{**sizes, **options})
    return FastWeightForCausalLM(FastWeightConfig.of(network, line_token_id=7)).eval()


def test_generate_writes_what_ours_writes(demo):
    model, tokenizer, ours = demo
    rows = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    assert rows["attention_mask"][1, 0] == 0, "padding must be on the left"
    expected = [ours.generate(prompt, tokens=12, temperature=0) for prompt in PROMPTS]
    greedy = model.generate(**rows, max_new_tokens=12, do_sample=False)
    assert tokenizer.batch_decode(greedy, skip_special_tokens=True) == expected
    one = tokenizer(PROMPTS[0], return_tensors="pt")
    for way in ({"use_cache": False}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
        found = model.generate(**one, max_new_tokens=12, do_sample=False, **way)
        assert tokenizer.decode(found[0]) == expected[0], way
    # A text may begin with nothing.
    empty = model.generate(torch.tensor([[tokenizer.bos_token_id]]), max_new_tokens=5, do_sample=False)
    assert tokenizer.decode(empty[0, 1:]) == ours.generate("", tokens=5, temperature=0)
    torch.manual_seed(0)
    drawn = model.generate(**rows, max_new_tokens=4, do_sample=True, top_k=5)
    torch.manual_seed(0)
    assert torch.equal(drawn, model.generate(**rows, max_new_tokens=4, do_sample=True, top_k=5, use_cache=False))


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "gated_delta", "short_conv": 3, "normalization": "l2"},
        {"rule": "sum", "normalization": "attention", "cutoffs": (20,)},
        {"mixer": "softmax", "feature_map": "elu"},
    ],
    ids=["gated delta", "linear", "softmax"],
)
def test_beams_caches_and_padding_change_nothing(options):
    model = small(**options)
    x = torch.randint(V, (2, 9))
    x[1, :4] = model.config.pad_token_id
    mask = (x != model.config.pad_token_id).long()
    search = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "attention_mask": mask}
    beams = model.generate(x, **search)
    assert torch.equal(beams, model.generate(x, use_cache=False, **search))
    alone = model.generate(x[1:, 4:], **(search | {"attention_mask": mask[1:, 4:]}))
    assert torch.equal(alone[0], beams[1, 4:])
    with torch.no_grad():
        whole = model(x, attention_mask=mask).logits
        first = model(x[:, :6], attention_mask=mask[:, :6])
        second = model(x[:, 6:], attention_mask=mask, past_key_values=first.past_key_values)
    parts = torch.cat([first.logits, second.logits], 1)
    assert second.past_key_values.get_seq_length() == 9
    torch.testing.assert_close(parts[mask.bool()], whole[mask.bool()], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole[1, 4:], model(x[1:, 4:]).logits[0], rtol=1e-4, atol=1e-5)
    # The two tokens beside the vocabulary are never predicted.
    assert whole.shape[-1] == model.config.vocab_size == V + 2 and (whole[..., V:] == -torch.inf).all()
    continued = model.generate(beams[:1], past_key_values=None, max_new_tokens=3, do_sample=False)
    cache = model(beams[:1, :-1], use_cache=True).past_key_values
    assert torch.equal(continued, model.generate(beams[:1], past_key_values=cache, max_new_tokens=3, do_sample=False))


@torch.no_grad()
def test_tokens_can_be_taken_back():
    model, x = small(), torch.randint(V, (1, 12))
    cache = FastWeightCache()
    model(x[:, :4], past_key_values=cache)
    cache.activate_past_recording()
    model(torch.cat([x[:, 4:7], torch.randint(V, (1, 3))], 1), past_key_values=cache)
    cache.crop(-3)
    assert cache.get_seq_length() == 7
    cache.crop(-1)
    cache.crop(0)
    logits = model(x[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(logits, model(x).logits[:, 6:], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="from 1 to 8 tokens here"):
        cache.crop(-9)
    with pytest.raises(TypeError, match="must be a FastWeightCache"):
        model(x, past_key_values=transformers.DynamicCache())


@torch.no_grad()
@pytest.mark.parametrize("read", [0, 4])
def test_rows_are_chosen_after_tokens_were_taken_back(read):
    model, x, order = small(), torch.randint(V, (2, 12)), torch.tensor([1, 0, 1])
    cache = FastWeightCache()
    if read:
        model(x[:, :read], past_key_values=cache)
    cache.activate_past_recording()
    model(x[:, read:9], past_key_values=cache)
    cache.crop(-2)
    cache.reorder_cache(order)
    cache.batch_repeat_interleave(2)
    rows = x[order].repeat_interleave(2, 0)
    logits = model(rows[:, 7:], past_key_values=cache).logits
    torch.testing.assert_close(logits, model(rows).logits[:, 7:], rtol=1e-4, atol=1e-5)


def test_the_loss_is_that_of_ours_and_gradients_flow():
    model, x = small(cutoffs=(20,)), torch.randint(V, (2, 9))
    labels = x.clone()
    labels[0, 5:] = -100
    output = model.train()(x, labels=labels)
    losses, _ = model.network.loss(x[:, :-1], x[:, 1:])
    assert output.logits is None and output.past_key_values is None
    torch.testing.assert_close(output.loss, losses[labels[:, 1:] != -100].mean())
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    evaluated = model.eval()(x, labels=labels)
    shifted = torch.nn.functional.cross_entropy(evaluated.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(evaluated.loss, shifted)


def test_positions_that_count_padding_refuse_it():
    model = small(positions="sinusoid")
    assert not model.config.use_cache
    x = torch.randint(V, (1, 5))
    assert model.generate(x, max_new_tokens=2, do_sample=False).shape == (1, 7)
    with pytest.raises(ValueError, match="count padding too"):
        model(x, attention_mask=torch.tensor([[0, 1, 1, 1, 1]]))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers_give_the_same_numbers(kind, tmp_path):
    texts = ["Hello world, this is\na test. Größe 東京 😀!\n\nEnd  of it\t.\n", "the list is the list\n"]
    ours = TOKENIZERS[kind].train(texts * 3, size=300 if kind == "bpe" else None)
    fast_tokenizer(ours).save_pretrained(tmp_path)
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(fast) == ours.size + 2
    for text in [*texts, "", "\n", "a\r\nb\rc", " lead", "trail ", "naïve <unk> café", "ÿ\x80Ċ"]:
        numbers = ours.encode(text)
        assert fast(text)["input_ids"] == numbers and fast.decode(numbers) == ours.decode(numbers), text


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_translation_models_search_as_ours(attention, tmp_path):
    ours = PairTokenizer.train(["two three", "drei vier"] * 3, size=280)
    tokenizer = fast_tokenizer(ours)
    lines = ["two three drei", "x é"]
    rows = tokenizer(lines, return_tensors="pt", padding=True, return_token_type_ids=False)
    assert [row[mask.bool()].tolist() for row, mask in zip(*rows.values(), strict=True)] == [
        [*ids, tokenizer.eos_token_id] for ids in ours.encode_batch(lines)
    ]
    assert tokenizer.batch_decode(rows["input_ids"], skip_special_tokens=True) == lines
    positions = dict.fromkeys(("encoder", "decoder", "cross"), attention)
    sizes = {"d_model": 32, "n_heads": 4, "d_ff": 48, "encoder_layers": 1, "decoder_layers": 2}
    network = TranslationModelConfig(vocab_size=ours.size, **sizes, **positions)
    torch.manual_seed(0)
    model = FastWeightForSeq2SeqLM(FastWeightTranslationConfig.of(network)).eval()
    model.save_pretrained(tmp_path)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    found = model.generate(**rows, max_new_tokens=8, do_sample=False, num_beams=1)
    expected = beam_search(model.network, rows["input_ids"], rows["attention_mask"].bool(), beam=1, max_length=9)
    for row, (best,) in zip(found.tolist(), expected, strict=True):
        assert row[1:][: len(best.tokens)] == best.tokens
    beams = model.generate(**rows, max_new_tokens=8, do_sample=False, num_beams=3)
    assert torch.equal(beams, model.generate(**rows, max_new_tokens=8, do_sample=False, num_beams=3, use_cache=False))
    output = model.train()(**rows, labels=rows["input_ids"])
    start = torch.full_like(rows["input_ids"][:, :1], model.config.decoder_start_token_id)
    target = torch.cat([start, rows["input_ids"][:, :-1]], 1)
    losses, _ = model.network.eval().loss(rows["input_ids"], rows["attention_mask"].bool(), target, rows["input_ids"])
    torch.testing.assert_close(model.eval()(**rows, labels=rows["input_ids"]).loss, losses.mean())
    output.loss.backward()


def test_translation_runs_are_exported(tmp_path):
    corpus = small_pairs(tmp_path)
    kind = ("--attention", "dpfp", "--rule", "delta", "--cross", "linear")
    assert train_mt(corpus, tmp_path / "run", *kind).exit_code == 0
    done = CliRunner().invoke(app, ["export", "hf", str(tmp_path / "run"), str(tmp_path / "exported")])
    assert done.exit_code == 0 and "FastWeightForSeq2SeqLM" in done.output, done.output
    ours, _ = TranslationRun.open(tmp_path / "run").load("best")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    rows = tokenizer(["house naïve the", "x"], return_tensors="pt", padding=True)
    encoded = rows["input_ids"], rows["attention_mask"].bool()
    with torch.no_grad():
        for network in (model.network, ours):
            # Sentences end soon, and their beginning, which is never written, would often be the most likely token.
            last = [module for module in network.modules() if isinstance(module, torch.nn.LayerNorm)][-1]
            network.embedding.weight[BOS] *= 2
            last.bias += 0.6 * network.embedding.weight[EOS]
    for beam, options in (
        (1, {"max_new_tokens": 5}),
        (4, {"max_new_tokens": 99, "num_beams": 4, "length_penalty": 0.0, "early_stopping": True}),
    ):
        found = tokenizer.batch_decode(model.generate(**rows, **options), skip_special_tokens=True)
        search = {"beam": beam, "length_penalty": 0.0, "max_length": 6 if beam == 1 else None}
        best = [sentence[0] for sentence in beam_search(ours, *encoded, **search)]
        assert found == [corpus.tokenizer.decode(hypothesis.tokens) for hypothesis in best] and all(found)


def test_trainer_trains_and_saves(tmp_path, demo):
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[hf]'")
    _, tokenizer, _ = demo
    torch.manual_seed(0)
    network = LanguageModelConfig(vocab_size=tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=1, d_ff=16)
    model = FastWeightForCausalLM(FastWeightConfig.of(network))
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in PROMPTS * 4]
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.05,
        logging_steps=1,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = transformers.Trainer(model, settings, train_dataset=rows, eval_dataset=rows, data_collator=collator)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4 and losses[-1] < losses[0] and trainer.evaluate()["eval_loss"] < losses[0]
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert all(torch.equal(saved.state_dict()[name], weight) for name, weight in model.state_dict().items())


TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: %s}
test_split: train
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
"""


def test_the_evaluation_harness_scores_a_local_task(folder, tmp_path, monkeypatch):
    evaluator = pytest.importorskip("lm_eval.evaluator", reason="lm-eval is not installed: pip install lm-eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [{"text": PROMPTS[0], "choices": [" the United States", " of the xyz qq"], "answer": 0}]
    rows += [{"text": "It is one of the", "choices": [" !!??", " most"], "answer": 1}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(TASK % (tmp_path / "data.jsonl"))
    found = evaluator.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "trust_remote_code": True},
        tasks=["local_choice"],
        task_manager=TaskManager(include_path=str(tmp_path)),
        device="cpu",
        batch_size=2,
    )
    assert found["results"]["local_choice"]["acc,none"] == 1.0


@pytest.mark.slow
def test_the_server_of_transformers_answers(folder, tmp_path):
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package, reason="no server: pip install 'transformers[serving]'")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--trust-remote-code"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with Path(tmp_path / "log").open("wb") as log:
        options = {"stdout": log, "stderr": log, "env": environment, "cwd": tmp_path}
        server = subprocess.Popen([*command, "--device", "cpu", "--port", str(port)], **options)
        try:
            question = {"model": str(folder), "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
            request = urllib.request.Request(
                f"http://localhost:{port}/v1/completions",
                json.dumps(question).encode(),
                {"Content-Type": "application/json"},
            )
            answer = None
            while answer is None:
                assert server.poll() is None, (tmp_path / "log").read_text()
                try:
                    with urllib.request.urlopen(request) as response:
                        answer = json.load(response)
                except urllib.error.URLError:
                    time.sleep(0.2)
        finally:
            server.terminate()
            server.wait()
    assert PROMPTS[0] + answer["choices"][0]["text"] == fw.load("demo").generate(PROMPTS[0], tokens=12, temperature=0)


def test_what_is_in_the_way_is_not_overwritten(folder):
    result = CliRunner().invoke(app, ["export", "hf", "demo", str(folder)])
    assert result.exit_code == 2 and "is not empty" in result.output
