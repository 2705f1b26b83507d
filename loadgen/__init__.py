"""Load generation: traces, replay and reports. Comes in a later version; the folder keeps its place."""
