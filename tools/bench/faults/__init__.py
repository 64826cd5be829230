"""Jobs that are broken on purpose, over and over: does every rank end in time, and does somebody say why?"""
