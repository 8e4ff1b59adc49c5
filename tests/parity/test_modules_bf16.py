"""bfloat16: every module, given the inputs transformers gave its own, returns the same bits (muse_spark.md 8.1)."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

import bf16_checks
from bf16_checks import Subject, verdicts

pytestmark = pytest.mark.parity

SLIDING, DENSE, FULL = 0, 2, 3


@pytest.mark.parametrize(
    "check, args",
    [
        ("embedding", ()),
        ("attention", (SLIDING,)),
        ("attention", (FULL,)),
        ("router", (SLIDING,)),
        ("moe", (SLIDING,)),
        ("dense_mlp", (DENSE,)),
        ("layer", (SLIDING,)),
        ("layer", (DENSE,)),
        ("layer", (FULL,)),
        ("head", ()),
    ],
)
def test_module(bf16_recording, check, args):
    found = verdicts(getattr(bf16_checks, check), Subject.create(bf16_recording), *args)
    for output, verdict in found.items():
        print(f"{check}{list(args)}.{output}: {verdict}")
    failed = {output: str(verdict) for output, verdict in found.items() if not verdict.passes}
    assert not failed
