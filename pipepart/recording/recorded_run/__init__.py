"""One recorded run of a model: its ops become nodes of a graph, and its sizes and numbers become tracked numbers.

The `recorder` sees every call and consists of the `graph_builder`, which makes nodes, and `numbers`. `patches` sends the
calls to it that torch's function mode does not see. `facts` are its working notes, from which the description of each op
is made. The package knows one run of a call. It must not know other runs or chunks.
"""
