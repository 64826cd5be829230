"""Lightning as others use it: their modules and example programs, and Lightning's own tests, under the pipeline strategy."""
