"""NVFP4 packing against torchao: the same bytes but for ties, since torchao multiplies by reciprocals where we divide."""

import warnings

import ml_dtypes
import numpy as np
import pytest

from muse_jax import nvfp4

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own source
    torchao = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="torchao is not installed")

pytestmark = pytest.mark.parity


@pytest.fixture
def pair(rng):
    """A matrix [N, K] of bf16 packed by us and by torchao, with one global scale; no block is near the smallest scale, where
    torchao stops at 2^-6 and ModelOpt, like us, at 2^-9."""
    blocks = rng.standard_normal((512, 64, 16)) * 2.0 ** rng.uniform(-9, 0, (512, 64, 1))
    weight = blocks.reshape(512, 1024).astype(ml_dtypes.bfloat16)
    weight[0, 0] = 8
    ours = nvfp4.quantize(weight, "weight")
    tensor = torch.from_numpy(weight.astype(np.float32)).bfloat16()
    scale = torchao.per_tensor_amax_to_scale(tensor.abs().max())
    return ours, torchao.NVFP4Tensor.to_nvfp4(tensor, per_tensor_scale=scale)


def test_packing(pair):
    ours, theirs = pair
    assert ours.global_scale == theirs.per_tensor_scale.numpy()
    block_scales = theirs.scale.reshape(512, 64).view(torch.uint8).numpy()
    our_codes, their_codes = nvfp4.unpack(ours.codes), nvfp4.unpack(theirs.qdata.view(torch.uint8).numpy())
    equal_scales = np.mean(ours.block_scales.view(np.uint8) == block_scales)
    equal_codes = np.mean(our_codes == their_codes)
    print(f"equal block scales {equal_scales:.4%}, equal codes {equal_codes:.4%}")
    assert equal_scales >= 0.999
    assert equal_codes >= 0.999
    # Where codes differ, they are the two neighbours of a tie.
    same = np.repeat(ours.block_scales.view(np.uint8) == block_scales, 16, axis=1)
    assert np.abs(our_codes.astype(int) - their_codes)[same].max() <= 1


def test_decoding(pair):
    """torchao multiplies by the global scale in float32, as `dequantize` does, after it met the block scale: two roundings."""
    _, theirs = pair
    packed = nvfp4.NVFP4Weight(
        theirs.qdata.view(torch.uint8).numpy(),
        theirs.scale.reshape(512, 64).view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn),
        theirs.per_tensor_scale.numpy(),
        np.float32(1),
    )
    np.testing.assert_allclose(packed.dequantize(), theirs.dequantize(torch.float32).numpy(), rtol=2**-22, atol=0)
