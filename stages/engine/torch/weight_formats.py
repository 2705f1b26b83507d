"""Storing fp32 weights in the official number formats.

Source: facts-model 7 (formats, scales are powers of two, ties to the even e2m1 code).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quant_fp4 import TOP as E2M1_TOP
from kernels.quant_fp4 import e2m1_codes, pack_nibbles
from kernels.quant_fp8 import TOP as E4M3_TOP
from kernels.quant_fp8 import power_of_two_scale, split_last
from stages.engine.torch.tensor_specs import BLOCK, Format, Spec

_LEAST = 2.0**-100  # a block of zeros gets a small scale instead of none


def store(spec: Spec, weight: Tensor) -> dict[str, Tensor]:
    """The tensors on disk of one fp32 weight of shape `spec.shape`, by official name."""
    match spec.format:
        case Format.BF16:
            return {spec.name: weight.bfloat16()}
        case Format.FP32:
            return {spec.name: weight.float()}
        case Format.FP8:
            return _two(spec, *_fp8(weight, BLOCK))
        case Format.FP8_ROWS:
            return _two(spec, *_fp8(weight, 1))
        case Format.MXFP4:
            return _two(spec, *_mxfp4(weight))


def _two(spec: Spec, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
    return {f"{spec.name}.weight": codes, f"{spec.name}.scale": scale}


def _fp8(weight: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """e4m3 codes [o, i] and one scale per `rows` x 32 block."""
    height, width = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -width % BLOCK, 0, -height % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // BLOCK, BLOCK)
    scale = power_of_two_scale(blocks.abs().amax((1, 3)).clamp_min(_LEAST) / E4M3_TOP)
    codes = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:height, :width]
    return codes.to(torch.float8_e4m3fn).contiguous(), _exponents(scale)


def _mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed e2m1 codes [o, i/2] and one scale per 32 channels of a row."""
    blocks = split_last(weight, BLOCK)
    scale = power_of_two_scale(blocks.abs().amax(-1).clamp_min(_LEAST) / E2M1_TOP)
    packed = pack_nibbles(e2m1_codes(blocks / scale.unsqueeze(-1)).flatten(1))
    return packed.view(torch.int8), _exponents(scale)


def _exponents(scale: Tensor) -> Tensor:
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)
