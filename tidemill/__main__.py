"""`python -m tidemill`: how the supervisor starts its workers."""

from __future__ import annotations

from tidemill import main

main()
