"""Predicts what a step costs, in bytes and seconds, from plan and trace: runs and compiles nothing.

Tables, pages and searches show these numbers, and lie above. What reads compiled programs is in `forecasting`.
"""
