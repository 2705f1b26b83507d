from __future__ import annotations

import pytest
import torch

from kernels.packed_attention import Chosen, Window, packed_attention, packed_attention_triton
from kernels.quant_fp4 import pack_main, unpack_main
from kernels.quant_fp8 import pack_q8, unpack_q8
from kernels.sparse_attention import sparse_attention


def random(*shape: int, seed: int = 60) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def apart(rows: torch.Tensor) -> torch.Tensor:
    """The same rows with poison before and after each."""
    wide = torch.full((*rows.shape[:2], rows.shape[2] + 5), 255, dtype=torch.uint8)
    wide[:, :, 2:-3] = rows
    return wide[:, :, 2:-3]


def window(width: int, size: int = 16) -> Window:
    """Five rows: few positions and a start below 0, wrapped, replayed from 10 on, at the ring's edge, one visible."""
    return Window(
        ring=apart(pack_q8(random(4, 20, width))[0]),
        states=torch.tensor([0, 3, 2, 1, 3]),
        positions=torch.tensor([3, 1_000_040, 19, 20, 100]),
        first=torch.tensor([-5, 0, 10, 0, 100]),
        size=size,
    )


def chosen(width: int, k: int = 40) -> Chosen:
    generator = torch.Generator().manual_seed(61)
    return Chosen(
        main=apart(pack_main(random(6, 8, width))),
        index=torch.randint(-1, 24, (5, k), generator=generator),
        tables=torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(5)]),
    )


@pytest.mark.parametrize(("heads", "width"), [(4, 64), (20, 32), (1, 512), (5, 96)])
@pytest.mark.parametrize("k", [None, 40, 1, 0])
def test_the_kernel_agrees_with_the_reference(poisoned, heads, width, k):
    q, sink = random(5, heads, width), random(heads, seed=62)
    where = None if k is None else chosen(width, k)
    wanted = packed_attention(q, window(width), sink, where)
    assert torch.allclose(packed_attention_triton(q, window(width), sink, where), wanted, rtol=0, atol=1e-5)


def test_the_reference_attends_to_the_rows_that_the_equation_names():
    q, sink, w, c = random(5, 4, 64), random(4, seed=62), window(64), chosen(64)
    for row in range(5):
        p, first = int(w.positions[row]), int(w.first[row])
        ring = torch.stack([w.ring[w.states[row], at % 20] for at in range(max(0, first, p - 15), p + 1)])
        entries = [e for e in c.index[row].tolist() if e >= 0]
        main = torch.stack([c.main[c.tables[row, e // 8], e % 8] for e in entries])
        keys = torch.cat([unpack_q8(ring), unpack_main(main)]).unsqueeze(0)
        want = sparse_attention(q[row : row + 1], keys, torch.ones(1, keys.shape[1], dtype=torch.bool), sink)
        assert torch.allclose(packed_attention(q, w, sink, c)[row], want[0], atol=1e-5)


def test_hidden_rows_may_hold_anything(poisoned):
    q, sink, w, c = random(5, 4, 64), random(4, seed=62), window(64), chosen(64)
    wanted = packed_attention_triton(q, w, sink, c)
    w.ring[0, 4:] = 0x7F  # NaN: the first row sees positions 0 to 3 of this state, nobody else reads it
    used = {(int(c.tables[r, e // 8]), e % 8) for r in range(5) for e in c.index[r].tolist() if e >= 0}
    for block in range(6):
        for slot in range(8):
            if (block, slot) not in used:
                c.main[block, slot] = 0x7F
    assert torch.equal(packed_attention_triton(q, w, sink, c), wanted)
    assert torch.allclose(packed_attention(q, w, sink, c), wanted, rtol=0, atol=1e-5)


def test_a_rows_bits_do_not_depend_on_its_company(poisoned):
    q, sink, w, c = random(5, 4, 64), random(4, seed=62), window(64), chosen(64)
    full = packed_attention_triton(q, w, sink, c)
    alone = Window(ring=w.ring, states=w.states[2:3], positions=w.positions[2:3], first=w.first[2:3], size=w.size)
    its_own = Chosen(main=c.main, index=c.index[2:3], tables=c.tables[2:3])
    assert torch.equal(packed_attention_triton(q[2:3], alone, sink, its_own), full[2:3])


def test_no_rows(poisoned):
    none = torch.zeros(0, dtype=torch.int64)
    w = Window(ring=window(64).ring, states=none, positions=none, first=none, size=16)
    assert packed_attention_triton(random(0, 4, 64), w, random(4)).shape == (0, 4, 64)
