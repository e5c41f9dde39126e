"""Recurrent layers (LSTM, GRU, RNN) to our ops, from any front end."""
