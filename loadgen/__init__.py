"""Load generation: traces, replay and reports. Comes with the balance issue; the folder keeps its place."""
