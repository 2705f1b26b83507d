"""One module per stage, glue only; the engines; and the pure functions that balance them."""
