"""stub"""
from torch import nn
class TiledLinear(nn.Module):
    def tiles(self): return []
