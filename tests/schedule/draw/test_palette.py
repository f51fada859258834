from pipework.schedule import KINDS
from pipework.schedule.draw.palette import cell_colors


def test_text_on_every_shade_is_readable():
    def light(color):
        channels = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        red, green, blue = (each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05

    for row in KINDS.values():
        for depth in range(5):
            fill, ink, _ = cell_colors(row.color, 0, depth)
            dark, bright = sorted((light(fill), light(ink)))
            assert bright / dark > 4.3
