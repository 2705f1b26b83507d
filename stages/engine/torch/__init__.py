"""The torch engine: the V4.1 architecture in plain fp32 torch, from official checkpoints, on a CPU.

Order of reading: config, checkpoint, weights, kv_layout, kv_bytes, rows, prefill_rows, decode_rows, model, runner.
Callers set `torch.set_num_threads(1)`: results are bit-equal for any batch and chunking only then, and a second
thread is slower beside any other busy process (facts-spikes 7.1).
"""
