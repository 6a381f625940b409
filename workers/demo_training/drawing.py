"""Generation of the small model's training images: printed numbers and coloured shapes.

Fonts come from installed packages. Fonts in `HELD_OUT_FONTS` are not used for training; the first of them is included
in Pillow, so that pictures for a demonstration need no font package.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from vsched.errors import ConfigError

BUILT_IN_FONT = "pillow"
"""Aileron, the font inside Pillow."""

TRAINING_FONTS: dict[str, tuple[str, ...]] = {
    "matplotlib": (
        *("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSans-Oblique.ttf"),
        *("DejaVuSans-BoldOblique.ttf", "DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf"),
        *("DejaVuSerif.ttf", "DejaVuSerif-Bold.ttf", "DejaVuSerif-Italic.ttf"),
        *("STIXGeneral.ttf", "STIXGeneralBol.ttf", "STIXGeneralItalic.ttf"),
        *("cmr10.ttf", "cmss10.ttf", "cmtt10.ttf", "cmb10.ttf"),
    ),
    "font_source_sans_pro": (
        *("SourceSansPro-Light.ttf", "SourceSansPro-Regular.ttf", "SourceSansPro-It.ttf"),
        *("SourceSansPro-Semibold.ttf", "SourceSansPro-Bold.ttf", "SourceSansPro-Black.ttf"),
    ),
    "font_source_serif_pro": (
        *("SourceSerifPro-Regular.ttf", "SourceSerifPro-It.ttf", "SourceSerifPro-Semibold.ttf"),
        *("SourceSerifPro-Bold.ttf", "SourceSerifPro-Black.ttf"),
    ),
    "font_hanken_grotesk": (
        *("HankenGrotesk-Regular.otf", "HankenGrotesk-Italic.otf", "HankenGrotesk-Medium.otf"),
        *("HankenGrotesk-Bold.otf", "HankenGrotesk-BoldItalic.otf"),
    ),
    "font_roboto": (
        *("Roboto-Light.ttf", "Roboto-Regular.ttf", "Roboto-Italic.ttf"),
        *("Roboto-Medium.ttf", "Roboto-Bold.ttf", "Roboto-Black.ttf"),
    ),
    "font_fredoka_one": ("FredokaOne-Regular.ttf",),
}
HELD_OUT_FONTS: dict[str, tuple[str, ...]] = {
    BUILT_IN_FONT: ("",),
    "font_caladea": ("Caladea-Regular.ttf", "Caladea-Bold.ttf", "Caladea-Italic.ttf"),
    "font_manrope": ("Manrope-Regular.ttf", "Manrope-SemiBold.ttf", "Manrope-ExtraBold.ttf"),
}

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 30, 35),
    "green": (30, 150, 50),
    "blue": (35, 70, 215),
    "yellow": (245, 220, 40),
    "orange": (245, 135, 20),
    "purple": (135, 40, 165),
    "black": (18, 18, 18),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
OBJECTS_MAX = 9
DIGITS_MAX = 6
OBJECT, LOOSE = -1, -2
_OVERSAMPLING = 3


@dataclass(frozen=True, slots=True)
class Mark:
    """The position of something in a picture: a digit of a number, or an object.

    Attributes:
        x: Position of the center, as a share of the width.
        y: As a share of the height.
        slot: The digit's place in the number, from 0; `OBJECT` for an object, `LOOSE` for a digit that forms no number.
        value: The digit, or the colour's index.
        shape: The shape's index; -1 for a digit.
    """

    x: float
    y: float
    slot: int
    value: int
    shape: int = -1


@dataclass(frozen=True, slots=True)
class Picture:
    """An image and the marks in it."""

    image: Image.Image
    marks: tuple[Mark, ...]


@functools.cache
def font_files(*, held_out: bool, packages: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Return the paths of the training or held-out fonts; "" is the one inside Pillow.

    Raises:
        ConfigError: When a font package is not installed.
    """
    table = HELD_OUT_FONTS if held_out else TRAINING_FONTS
    paths = []
    for package in packages or tuple(table):
        directory = "" if package == BUILT_IN_FONT else f"{_font_directory(package)}/"
        paths += [directory + name for name in table[package]]
    return tuple(paths)


def _font_directory(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ConfigError(
            f"the fonts of {package!r} are not installed. Remedy: pip install 'vsched[training]'."
        )
    inside = "mpl-data/fonts/ttf" if package == "matplotlib" else "files"
    return Path(found.origin).parent / inside


@functools.lru_cache(maxsize=4096)
def _font(path: str, size: int) -> ImageFont.FreeTypeFont:
    if path:
        return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


def draw_number(
    rng: np.random.Generator, text: str, fonts: Sequence[str], difficulty: float
) -> Picture:
    """Draw a number; the difficulty increases the variation of its size, place, slant, colours and noise.

    Above 1, the difficulty of held-out samples, the thickness of strokes varies, too.
    """
    font = _any_font(rng, fonts, difficulty)
    left, top, right, bottom = font.getbbox(text)
    text_width, text_height = right - left, bottom - top
    angle = float(rng.normal(0, 2.5) * difficulty) if rng.random() < 0.5 * difficulty else 0.0
    slack = abs(math.sin(math.radians(angle))) * text_width
    width = max(56, math.ceil(text_width + 6 + rng.uniform(0, 14 + 36 * difficulty)))
    height = max(56, math.ceil(text_height + slack + 6 + rng.uniform(0, 10 + 26 * difficulty)))
    x = rng.uniform(3, max(3.5, width - text_width - 3))
    y = rng.uniform(3 + slack / 2, max(3.5 + slack / 2, height - text_height - 3 - slack / 2))
    mask = Image.new("L", (width, height))
    stroke = _stroke(rng, difficulty)
    ImageDraw.Draw(mask).text((x - left, y - top), text, fill=255, font=font, stroke_width=stroke)
    middle = (x + text_width / 2, y + text_height / 2)
    if angle:
        mask = mask.rotate(angle, resample=Image.Resampling.BICUBIC, center=middle)
    marks = []
    turn = math.radians(angle)
    for slot, digit in enumerate(text):
        begin = font.getlength(text[:slot]) - left + x
        along = begin + font.getlength(digit) / 2 - middle[0]
        marks.append(
            Mark(
                x=(middle[0] + along * math.cos(turn)) / width,
                y=(middle[1] - along * math.sin(turn)) / height,
                slot=slot,
                value=int(digit),
            )
        )
    back, front = _contrasting(rng, difficulty)
    canvas = _background(rng, width, height, back, difficulty)
    canvas.paste(Image.new("RGB", (width, height), front), mask=mask)
    return Picture(_finished(rng, canvas, difficulty), tuple(marks))


def _any_font(
    rng: np.random.Generator, fonts: Sequence[str], difficulty: float
) -> ImageFont.FreeTypeFont:
    """Return a font with digits of 24 to 28 pixels at difficulty 0, 16 to 36 at 1."""
    height = rng.uniform(24 - 8 * difficulty, 28 + 8 * difficulty)
    return _font(fonts[int(rng.integers(len(fonts)))], round(height / 0.72))


def _stroke(rng: np.random.Generator, difficulty: float) -> float:
    """Return the thickening of strokes in pixels, small enough that a 6 does not become an 8."""
    if difficulty <= 1 or rng.random() < 0.6:
        return 0.0
    return float(rng.uniform(0.2, 0.9))


def draw_page(rng: np.random.Generator, fonts: Sequence[str], difficulty: float) -> Picture:
    """Draw lines full of digits: much more training signal than a single number."""
    width, height = (int(side) for side in rng.integers(84, 141, size=2))
    back, front = _contrasting(rng, difficulty)
    canvas = _background(rng, width, height, back, difficulty)
    draw = ImageDraw.Draw(canvas)
    stroke = _stroke(rng, difficulty)
    marks = []
    y = float(rng.uniform(1, 12))
    while True:
        font = _any_font(rng, fonts, difficulty)
        text = "".join(str(digit) for digit in rng.integers(0, 10, size=16))
        x = float(rng.uniform(2, 16))
        while len(text) > 1 and x + font.getlength(text) > width - 2:
            text = text[:-1]
        left, top, _, bottom = font.getbbox(text)
        if y + bottom - top > height - 1:
            break
        draw.text((x - left, y - top), text, fill=front, font=font, stroke_width=stroke)
        for place, digit in enumerate(text):
            along = x - left + font.getlength(text[:place]) + font.getlength(digit) / 2
            middle = y + (bottom - top) / 2
            marks.append(Mark(along / width, middle / height, LOOSE, int(digit)))
        y += bottom - top + float(rng.uniform(2, 10))
    return Picture(_finished(rng, canvas, difficulty), tuple(marks))


def draw_objects(
    rng: np.random.Generator,
    objects: Sequence[tuple[str, str]],
    difficulty: float,
) -> Picture:
    """Draw objects, each a colour and a shape, apart from each other and whole within the picture."""
    count = len(objects)
    if count == 1:
        sides = rng.integers(56, 85 + round(60 * difficulty), size=2)
        largest = min(sides) / 2 - 3
        radii = [float(rng.uniform(max(13.0, 0.5 * largest * (2 - difficulty)), largest))]
    else:
        sides = rng.integers(84 + 4 * count, 113 + round(57 * difficulty) + 1, size=2)
        largest = min(17.0, 0.30 * math.sqrt(sides[0] * sides[1] / count))
        radii = [float(r) for r in rng.uniform(max(8.0, 0.6 * largest), largest, size=count)]
    width, height = int(sides[0]), int(sides[1])
    places = _places(rng, width, height, radii)
    colours = [_jittered(rng, COLOURS[colour], 14) for colour, _ in objects]
    canvas = _background(rng, width, height, _backdrop(rng, colours), difficulty)
    large = (width * _OVERSAMPLING, height * _OVERSAMPLING)
    canvas = canvas.resize(large, Image.Resampling.BILINEAR)
    draw = ImageDraw.Draw(canvas)
    marks = []
    for (colour, shape), (x, y, radius), paint in zip(objects, places, colours, strict=True):
        _draw_shape(rng, draw, shape, (x, y, radius), paint)
        marks.append(
            Mark(
                x=x / width,
                y=y / height,
                slot=OBJECT,
                value=list(COLOURS).index(colour),
                shape=SHAPES.index(shape),
            )
        )
    canvas = canvas.resize((width, height), Image.Resampling.BOX)
    return Picture(_finished(rng, canvas, difficulty), tuple(marks))


def _places(
    rng: np.random.Generator, width: int, height: int, radii: list[float]
) -> list[tuple[float, float, float]]:
    """Place circles of these radii without contact; shrink them if necessary."""
    while True:
        placed: list[tuple[float, float, float]] = []
        for radius in radii:
            for _ in range(40):
                x = rng.uniform(radius + 2, width - radius - 2)
                y = rng.uniform(radius + 2, height - radius - 2)
                if all(math.hypot(x - u, y - v) > radius + r + 4 for u, v, r in placed):
                    placed.append((x, y, radius))
                    break
            else:
                break
        if len(placed) == len(radii):
            return placed
        radii = [radius * 0.95 for radius in radii]


def _draw_shape(
    rng: np.random.Generator,
    draw: ImageDraw.ImageDraw,
    shape: str,
    place: tuple[float, float, float],
    paint: tuple[int, int, int],
) -> None:
    x, y, radius = (value * _OVERSAMPLING for value in place)
    tilt = rng.uniform(-0.2, 0.2)

    def polygon(corners: Sequence[tuple[float, float]]) -> None:
        """Draw a polygon of (angle, share of the radius) corners."""
        draw.polygon(
            [
                (x + radius * r * math.cos(a + tilt), y + radius * r * math.sin(a + tilt))
                for a, r in corners
            ],
            fill=paint,
        )

    up = -math.pi / 2
    if shape == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=paint)
    elif shape == "ring":
        thick = round(radius * rng.uniform(0.3, 0.42))
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=paint, width=thick)
    elif shape == "square":
        polygon([(math.pi / 4 + side * math.pi / 2, 1.0) for side in range(4)])
    elif shape == "triangle":
        polygon([(up + side * math.tau / 3, 1.0) for side in range(3)])
    elif shape == "star":
        polygon([(up + point * math.pi / 5, 0.42 if point % 2 else 1.0) for point in range(10)])
    else:
        arm = rng.uniform(0.26, 0.36)
        near, far, reach = math.atan2(arm, 1.0), math.sqrt(2) * arm, math.hypot(1.0, arm)
        polygon(
            [
                (quarter * math.pi / 2 + angle, length / reach)
                for quarter in range(4)
                for angle, length in ((-near, reach), (near, reach), (math.pi / 4, far))
            ]
        )


def _jittered(
    rng: np.random.Generator, colour: tuple[int, int, int], spread: int
) -> tuple[int, int, int]:
    red, green, blue = (
        min(255, max(0, value + int(rng.integers(-spread, spread + 1)))) for value in colour
    )
    return red, green, blue


def _any_colour(rng: np.random.Generator, low: int, high: int) -> tuple[int, int, int]:
    red, green, blue = (int(value) for value in rng.integers(low, high, size=3))
    return red, green, blue


def _contrasting(
    rng: np.random.Generator, difficulty: float
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return a light and a dark colour, in either order."""
    reach = round(70 * difficulty)
    light, dark = _any_colour(rng, 240 - reach, 256), _any_colour(rng, 0, 25 + reach)
    return (dark, light) if rng.random() < 0.4 * difficulty else (light, dark)


def _backdrop(
    rng: np.random.Generator, colours: Sequence[tuple[int, int, int]]
) -> tuple[int, int, int]:
    """Return a background that contrasts with every object on it: pale or dark grey, slightly tinted."""
    for _ in range(64):
        level = int(rng.integers(40, 240))
        red, green, blue = (int(level + v) for v in rng.integers(-15, 16, size=3))
        if all(math.dist((red, green, blue), colour) > 95 for colour in colours):
            return red, green, blue
    return 128, 128, 128


def _background(
    rng: np.random.Generator,
    width: int,
    height: int,
    colour: tuple[int, int, int],
    difficulty: float,
) -> Image.Image:
    """Return a plain background, or a gradient between the corners."""
    if rng.random() < 0.6:
        return Image.new("RGB", (width, height), colour)
    change = rng.uniform(-24, 24, size=4) * difficulty
    corners = np.clip(np.asarray(colour) + change[:, None], 0, 255).astype(np.uint8)
    corner_image = Image.fromarray(corners.reshape(2, 2, 3))
    return corner_image.resize((width, height), Image.Resampling.BILINEAR)


def _finished(rng: np.random.Generator, image: Image.Image, difficulty: float) -> Image.Image:
    """Add the effects of a camera or a scanner: blur and noise; sometimes scale the picture up."""
    if rng.random() < 0.25 * difficulty:
        image = image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.3, 0.8))))
    if rng.random() < 0.7 * difficulty:
        spread = np.float32(rng.uniform(2, 14))
        noise = rng.standard_normal((image.height, image.width, 3), dtype=np.float32) * spread
        image = Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
    if rng.random() < 0.03 * difficulty:
        scale = rng.uniform(1.3, 3)
        size = (round(image.width * scale), round(image.height * scale))
        image = image.resize(size, Image.Resampling.BICUBIC)
    return image
