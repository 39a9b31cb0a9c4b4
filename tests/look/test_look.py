"""What is recorded of a model, and the command that writes the page."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from fastweights.cli import app
from fastweights.look.page import as_data, page, reads
from fastweights.look.record import record
from tests.look.recordings import MODELS, TEXT, arrays, recorded, trained


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


@pytest.mark.parametrize("name", MODELS)
def test_a_recording_replays_what_the_model_read(name):
    reader = trained(**MODELS[name])
    layer, read = reader.model.blocks[2].mixer, []
    layer.register_forward_hook(lambda module, inputs, output: read.append(output[0]))
    recording = record(reader, reader.tokenizer.encode(TEXT), name, (1, 3))
    data = as_data(recording)
    y = reads(arrays(data, data["blocks"][1]), recording.attention)
    ours = layer.out(y.transpose(0, 1).flatten(1).float())
    # The model reads in float32; what is stored is rounded to 16 bits.
    assert (ours - read[0][0]).norm() / read[0].norm() < data["rounding"] + 1e-5 < 1e-3
    assert "".join(data["tokens"]) == TEXT and len(data["bits"]) == len(data["tokens"])


def test_a_page_says_what_a_text_says_whatever_that_is():
    html = page(recorded("kda"))
    assert data_of(html)["tokens"] == list(TEXT) and html.count("</script>") == 2
    # Nothing but itself: no address, file or style from elsewhere.
    assert not re.findall(r'(?:src|href)="(?!data:,)|@import|url\(|https?://(?!www\.w3\.org)', html)


def test_numbers_that_are_not_finite_are_refused():
    reader = trained(**MODELS["gated"])
    with torch.no_grad():
        reader.model.blocks[1].mixer.project.weight.fill_(torch.inf)
    with pytest.raises(ValueError, match=r"layer 2 of this model computes numbers .* not finite"):
        record(reader, [1, 2, 3], "gated", (1, 2, 3))


def test_costs_are_those_of_the_model():
    reader = trained(**MODELS["gated"])
    ids = reader.tokenizer.encode(TEXT)
    recording = record(reader, ids, "gated", (1,))
    tokens = torch.tensor([ids])
    nats, _ = reader.model.loss(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(torch.tensor(recording.bits[1:]), nats[0].detach() / torch.tensor(2.0).log())


def look(*arguments):
    return CliRunner().invoke(app, ["look", *map(str, arguments)])


def test_the_command_writes_a_page_of_the_demo(tmp_path):
    (tmp_path / "text").write_text("The film was released in the United States. " * 30)
    done = look("demo", "--text", tmp_path / "text", "--out", tmp_path / "page.html", "--device", "cpu")
    assert done.exit_code == 0, done.output
    html = (tmp_path / "page.html").read_text()
    data = data_of(html)
    assert len(data["tokens"]) == 200 and "Reading the first 200 of" in done.output
    assert len(data["blocks"]) == 6 and len(html.encode()) < 2e6
    look("demo", "--prompt", "The film was", "--layers", "2,5", "--out", tmp_path / "page.html", "--device", "cpu")
    assert [block["layer"] for block in data_of((tmp_path / "page.html").read_text())["blocks"]] == [2, 5]


def test_layers_that_do_not_fit_are_left_out_aloud(tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.look.command.ROOM", 20_000)
    done = look("demo", "--prompt", "The film was released", "--out", tmp_path / "page.html", "--device", "cpu")
    assert "Recorded layers 1, 3, 6 of 6, to keep the page below 2 MB" in done.output
    assert [block["layer"] for block in data_of((tmp_path / "page.html").read_text())["blocks"]] == [1, 3, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --text FILE or --prompt TEXT"),
        (["--prompt", "a", "--text", "b"], "either --text FILE or --prompt TEXT"),
        (["--text", "missing"], "--text missing cannot be read: No such file"),
        (["--prompt", "a"], "at least 2 tokens, got 1"),
        (["--prompt", "a b c", "--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["--prompt", "a b c", "--layers", "7"], "layers 1 to 6, got --layers 7"),
        (["--prompt", "a b c", "--layers", "x"], "numbers such as 1,4,6, got 'x'"),
    ],
)
def test_wrong_input_is_named(arguments, message):
    done = look("demo", *arguments, "--device", "cpu")
    assert done.exit_code == 2 and message in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "softmax"}, "mixer is 'softmax', which has no fast weights .* rules sum, delta, gated"),
        ({"rule": "schlag2021"}, "'schlag2021' is outside the family .* cannot be replayed; .* rules sum, delta"),
    ],
)
def test_other_models_are_refused_with_those_that_work(options, message):
    with pytest.raises(ValueError, match=message):
        record(trained(**options), [1, 2], "other", (1,))
