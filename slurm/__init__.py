"""What a site needs beside the packages: the development cluster. Nothing else imports it, and it imports no
package of this repository.
"""
