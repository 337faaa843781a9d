"""The simulator's place: it will drive `rose.core` with a virtual clock.  Empty in this release."""
