"""What a host's GPUs and its serving engine say of themselves: collect, normalise, and never guess.

`nvml` asks the driver's library, `normalise` turns answers into readings (pure functions), `sampler` keeps
one thread between a driver that may hang and a daemon that may not.  What cannot be had is `Unknown`.
"""
