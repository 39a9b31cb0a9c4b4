"""The retrieval models by name, and that their short cuts are the plain model whichever keys and queries are given."""

import pytest
import torch

from fastweights.models.retrieval import MODELS, RetrievalModel
from fastweights.models.retrieval_shortcuts import ShortcutRetrievalModel

ALL = [(setting, name) for setting, models in MODELS.items() for name in models]


def test_names_say_what_the_models_are():
    for setting, models in MODELS.items():
        for name, entry in models.items():
            phi, *number = name.removesuffix("-delta").removesuffix("-sum").split("-")
            if phi in ("favor", "dpfp"):
                assert (entry.feature_map, list(entry.options.values())) == (phi, [int(number[0])])
            if phi in ("linear", "favor", "dpfp"):
                assert entry.rule == ("sum" if setting == 1 else name.split("-")[-1])
            # The authors' batches and learning rates.
            assert (entry.batch, entry.lr) == ((128, 1e-4) if name == "schlag2021" else (32, 1e-3))
    assert list(MODELS[1]) == ["softmax", "linear", "favor-64", "favor-128", "favor-512", "dpfp-1", "dpfp-2", "dpfp-3"]


@pytest.mark.parametrize("queries", ["all", "one", "some"])
@pytest.mark.parametrize("keys", ["all", "some"])
@pytest.mark.parametrize(("setting", "name"), ALL)
def test_short_cuts_are_the_plain_model(setting, name, keys, queries):
    size, d_key, rows = 5, 4, 8
    plain, fast = (
        kind(size, MODELS[setting][name], d_key, torch.Generator().manual_seed(0), dtype=torch.float64)
        for kind in (RetrievalModel, ShortcutRetrievalModel)
    )
    symbols = torch.randint(size, (3, rows, size), generator=torch.Generator().manual_seed(1))
    given = None if keys == "all" else symbols[0]
    wanted = {"all": None, "one": symbols[1, :, :1], "some": symbols[1, :, :3]}[queries]
    found = [model(given, symbols[2], wanted) for model in (fast, plain)]
    torch.testing.assert_close(*found)
    gradients = [
        torch.autograd.grad(y.square().sum(), list(model.parameters()), allow_unused=True, materialize_grads=True)
        for y, model in zip(found, (fast, plain), strict=True)
    ]
    torch.testing.assert_close(*gradients)
