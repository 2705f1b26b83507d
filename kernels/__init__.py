"""One operation per file: equation, shapes, torch reference, and a Triton kernel where a GPU gains by one.

A public function runs its kernel for tensors on a GPU and the reference elsewhere; `launch` says how kernels are
written. Imports nothing of ours.

Bit rules that hold for every file: a row's result never depends on how many rows are computed with it, where
in the batch it stands, or how much context is padded. Matrix products over weights therefore run in blocks of
a fixed number of rows (`row_linear`), products per row have a constant shape, and non-linear functions are
built from `exp` and `log1p`, whose torch CPU kernels treat every element alike. (`torch.sigmoid`, `silu` and
`softplus` do not: the tail of a tensor takes another code path with other last bits.) One thread per process
is the caller's duty: `torch.set_num_threads(1)`.

Letters: T rows, D hidden width, R row block; others are defined in their file.
"""
