"""Training recipes: one file each, with a model and its step, and without anything about pipelines.

`pipepart recipes` lists them; `pipepart train recipe=NAME` trains one. The loaders that several recipes share are in
`text` and `images`.
"""
