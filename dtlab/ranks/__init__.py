"""Code of every runner of ranks, processes and simulator alike: checks that a function can be
called, calls packed to be unpacked for each rank, what ranks print, and whether the two sides of a
message fit together."""
