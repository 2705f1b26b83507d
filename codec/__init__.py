"""Text <-> token ids: protocols, prompt template, tokenizer, output streams. No I/O, no event loop, nothing of ours."""
