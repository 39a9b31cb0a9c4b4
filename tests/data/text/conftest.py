"""What the tests of texts share."""

import pytest

from fastweights.data.prepare import prepare
from fastweights.data.text.corpus import Corpus


@pytest.fixture(scope="session")
def embedded_corpus(tmp_path_factory):
    """The documentation of Python in words, which takes seconds to prepare."""
    out = tmp_path_factory.mktemp("embedded")
    prepare("embedded", None, out)
    return Corpus.load(out, verify=True)
