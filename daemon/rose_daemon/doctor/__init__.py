"""`rose doctor`: what a host lacks for ROSE.  Every check only reads, so it is safe beside live serving."""
