"""Switches one mechanism of the farm off at a time and sees that the test of its promise fails: a test that cannot fail proves nothing."""
