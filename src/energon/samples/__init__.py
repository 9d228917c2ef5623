"""samples"""
