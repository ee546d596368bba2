"""What the `urls` stage leaves out by default: places with little running text, and files that are not pages.

A domain stands for all its subdomains. `--blacklist-domains` and `--blacklist-extensions` give other lists.
"""

DOMAINS = frozenset("""
    500px.com akamaihd.net aliexpress.com amazonaws.com artstation.com bandcamp.com bit.ly buff.ly cloudfront.net
    dailymail.co.uk dailymotion.com deviantart.com discord.com discord.gg dropbox.com ebay.com etsy.com
    facebook.com fb.com fb.me flickr.com gfycat.com giphy.com gofundme.com goo.gl hulu.com imgflip.com imgur.com
    instagram.com is.gd itch.io justpaste.it kickstarter.com linkedin.com liveleak.com mega.nz memegenerator.net
    mixcloud.com netflix.com onlyfans.com ow.ly paypal.com photobucket.com pinimg.com pinterest.com pixiv.net
    pornhub.com prntscr.com puu.sh quickmeme.com redd.it reddit.com redgifs.com redtube.com sli.mg slideshare.net
    snapchat.com soundcloud.com spotify.com steamcommunity.com steampowered.com streamable.com t.co t.me
    telegram.me tiktok.com tinypic.com tinyurl.com tumblr.com twitch.tv twitter.com vimeo.com vine.co vk.com
    weibo.com whatsapp.com x.com xhamster.com xnxx.com xvideos.com youtu.be youtube.com
""".split())

EXTENSIONS = frozenset("""
    .3gp .7z .aac .apk .avi .bin .bmp .bz2 .css .csv .deb .dmg .doc .docx .eot .epub .exe .flac .flv .gif .gifv
    .gz .ico .iso .jar .jpeg .jpg .js .json .m3u8 .m4a .m4v .mid .mkv .mov .mp3 .mp4 .mpeg .mpg .msi .ods .odt
    .ogg .ogv .otf .pdf .png .ppt .pptx .ps .rar .rpm .rss .svg .swf .tar .tgz .tif .tiff .torrent .ttf .wav .webm
    .webp .wma .wmv .woff .woff2 .xls .xlsx .xml .xz .zip .zst
""".split())
