"""Two engines behind one interface: the torch engine (the real architecture) and the stub engine (benches, chaos)."""
