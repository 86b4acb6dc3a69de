"""Commands about labels: choose pairs, ask people, find wrong labels, and estimate how many more pairs to label."""
