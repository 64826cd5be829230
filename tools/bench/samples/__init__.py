"""The batch check on the zoo: which models does it say mix samples, and what does it cost?"""
