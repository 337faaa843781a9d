"""The simulator's place: it will drive the machines of `rose.core` with a virtual clock.  Empty in this release."""
