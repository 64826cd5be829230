"""One recorded run: the ops that a model calls, as nodes of a graph, with its sizes and numbers as symbols."""
