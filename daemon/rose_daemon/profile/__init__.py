"""`rose profile`: how long the steps of a model take on this host."""
