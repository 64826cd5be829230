"""The program that tries bfloat16 and float16 products. It may be killed by a signal, so it runs in its own process.

It writes ``works NAME`` to file descriptor 1 for each dtype in turn. The file is run and never imported.
"""

import os
from contextlib import suppress

import torch

torch.set_num_threads(1)  # a forked process has none of the threads of its parent


def products(dtype: torch.dtype) -> None:
    for rows, columns in ((3, 5), (64, 256), (512, 512)):
        a = torch.ones(rows, columns, dtype=dtype, requires_grad=True)
        b = torch.ones(rows, columns, dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(a, b, torch.ones(rows, dtype=dtype)).sum().backward()
        torch.bmm(a[None], b.t()[None])
        q = a.reshape(1, 1, rows, columns)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    image, kernel = torch.ones(2, 16, 12, 12, dtype=dtype), torch.ones(32, 16, 3, 3, dtype=dtype, requires_grad=True)
    torch.nn.functional.conv2d(image, kernel).sum().backward()


for name in ("bfloat16", "float16"):
    with suppress(RuntimeError):  # an op that this version of torch lacks raises an error; it does not end the process
        products(getattr(torch, name))
    os.write(1, f"works {name}\n".encode())
