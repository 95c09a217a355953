"""Layers that communicate."""
