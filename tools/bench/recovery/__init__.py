"""Runs on two hosts of which one is lost: how long it takes until the other one trains, and how many steps are repeated."""
