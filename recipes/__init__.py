"""Training recipes: each one file with its model and its step, and nothing about pipelines in it.

`pipepart recipes` lists them; `pipepart train recipe=NAME` trains one. The loaders that several recipes share are in
`text` and `images`.
"""
